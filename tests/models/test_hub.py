"""Published weights: from a hub that answers, from the cache, and from a hub that does not.

The hub here is a real HTTP server of our own on this machine, which the hub's client is pointed at.
"""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
from huggingface_hub import constants
from safetensors.torch import save_file

from vit_edge.errors import UserError
from vit_edge.models import hub

PROGRAM = """
import sys
from vit_edge.models import zoo
from vit_edge.models.checkpoints import load_weights
from vit_edge.recipe import ModelConfig
config = ModelConfig(name=sys.argv[1], weights="pretrained")
model = zoo.create(config, 10, 32)
load_weights(model, "pretrained", config=config, classes=10, role="finetune", say=print)
print("sum", float(model.blocks[0].attn.qkv.weight.double().sum()))
"""


def load_pretrained(name: str, endpoint: str, cache: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
            exists = self.path.endswith("/model.safetensors")
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


def test_published_weights_are_fetched_once_and_then_come_from_the_cache(tmp_path, endpoint):
    first = load_pretrained("vit_ti16", endpoint, tmp_path / "cache")
    assert "fetching the weights" in first
    assert "positions resampled from 14×14 to 2×2" in first
    assert "replaced by a new one for 10 classes" in first
    again = load_pretrained("vit_ti16", "http://127.0.0.1:9", tmp_path / "cache")
    assert "fetching" not in again
    assert again.splitlines()[-1] == first.splitlines()[-1]
    assert again.splitlines()[-1].startswith("sum ")


def test_a_hub_out_of_reach_is_said_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "getproxies", dict)
    with pytest.raises(UserError) as caught:
        hub.fetch("vit_ti16", print)
    assert caught.value.problem.startswith("cannot reach 127.0.0.1 for the weights")
    assert "--weights FILE" in caught.value.fix


def test_a_model_that_nobody_published_is_said():
    with pytest.raises(UserError, match="no published weights of deit_b32 are known"):
        hub.fetch("deit_b32", print)
