"""The list of models: counts that the papers and timm agree on, at any size, and no claim without a test."""

import pytest
import timm

from vit_edge.models import catalogue, zoo


def test_names_are_ours_and_timms_by_part_or_pattern():
    assert catalogue.names() == list(zoo.OURS)
    assert "mobilenetv3_small_050" in catalogue.names("v3_small")
    assert catalogue.names("no-such-model") == []


def test_a_line_counts_at_its_size():
    native, smaller = catalogue.listed("resnet18"), catalogue.listed("resnet18", 112)
    assert native.parameters == sum(p.numel() for p in timm.create_model("resnet18").parameters())
    assert (native.family, native.image_size, smaller.image_size) == ("timm resnet", 224, 112)
    assert native.multiply_adds == pytest.approx(1.82e9, rel=0.01)
    assert smaller.multiply_adds == pytest.approx(native.multiply_adds / 4, rel=0.1)
    assert catalogue.listed("vit_ti16").multiply_adds == pytest.approx(1.17e9, rel=0.01)


def test_a_size_that_does_not_fit_says_why_in_a_line():
    line = catalogue.listed("vit_ti16", 100)
    assert line.parameters is line.multiply_adds is None
    assert "not a multiple of the patch side P = 16" in line.problem
    assert "\n" not in line.problem


@pytest.mark.parametrize(
    ("name", "proven"),
    [("vit_b16", True), ("resnet50d", True), ("repvit_m0_9", True), ("vit_base_patch16_224", False), ("r50_vit_b16", False),
     ("resnetv2_50", False), ("resnet50_clip", False), ("swin_s3_tiny_224", False), ("efficientnet_b0", False)],
)  # fmt: skip
def test_int8_is_claimed_for_the_tested_families_alone(name, proven):
    assert bool(catalogue.proven_int8(name)) is proven
