"""Published weights: from a hub that answers, from the cache, and from a hub that does not.

The hub here is a real HTTP server of our own on this machine, which the hub's client is pointed at.
"""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from vit_edge.errors import UserError
from vit_edge.models import hub, zoo
from vit_edge.models.checkpoints import load_weights
from vit_edge.recipe import ModelConfig

NOWHERE = "http://127.0.0.1:9"
CONFIG = ModelConfig(name="vit_ti16", weights="pretrained")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def published(tmp_path) -> Path:
    model = timm.create_model("vit_tiny_patch16_224")
    path = tmp_path / "published.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture
def endpoint(published) -> Iterator[str]:
    content = published.read_bytes()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            exists = "vit_tiny" in self.path and self.path.endswith("/model.safetensors")
            self.send_response(200 if exists else 404)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(content) if exists else 0))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_published_weights_are_fetched_once_and_then_come_from_the_cache(published, endpoint, tmp_path, monkeypatch):
    said, cache = [], tmp_path / "cache"
    path = hub.fetch("vit_ti16", said.append, endpoint=endpoint, cache=cache)
    assert path.read_bytes() == published.read_bytes()
    assert said == ["fetching the weights timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"]
    assert hub.fetch("vit_ti16", said.append, endpoint=NOWHERE, cache=cache) == path
    assert len(said) == 1

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    model = zoo.create(CONFIG, 2, 32)
    load_weights(model, "pretrained", config=CONFIG, classes=["a", "b"], role="finetune", say=said.append)
    assert torch.equal(model.blocks[11].mlp.fc2.weight, load_file(published)["blocks.11.mlp.fc2.weight"])
    assert any("positions resampled from 14×14 to 2×2" in line for line in said)
    assert any("replaced by a new one for 2 classes" in line for line in said)


def test_a_hub_out_of_reach_is_said_with_the_way_out(tmp_path):
    with pytest.raises(UserError) as caught:
        hub.fetch("vit_ti16", print, endpoint=NOWHERE, cache=tmp_path)
    assert caught.value.problem.startswith("cannot reach 127.0.0.1 for the weights")
    assert "--weights FILE" in caught.value.fix


def test_weights_that_the_hub_does_not_have_are_said(endpoint, tmp_path):
    with pytest.raises(UserError, match="cannot fetch the weights"):
        hub.fetch("vit_s16", lambda line: None, endpoint=endpoint, cache=tmp_path / "cache")


def test_a_model_that_nobody_published_is_said():
    with pytest.raises(UserError, match="no published weights of deit_b32 are known"):
        hub.fetch("deit_b32", print)
