"""Shared fixtures. The import hook checks every annotated shape of the package at each call of the tests."""

import multiprocessing
import os
import shutil
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("curvature_gap", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    """An explicit generator, seeded the same in every test."""
    return torch.Generator().manual_seed(20251016)


@pytest.fixture
def randn(generator):
    """`randn(2, 3)`: standard normal numbers in float64."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw


@pytest.fixture
def as_nobody():
    """`as_nobody(function)`: its result or exception, as a user whom file permissions bind; root passes every one."""

    def call(function):
        if os.geteuid() != 0:
            return function()
        receiver, sender = multiprocessing.Pipe(duplex=False)

        def child():
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            try:
                sender.send((function(), None))
            except Exception as error:
                sender.send((None, error))

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        result, error = receiver.recv()
        process.join()
        if error is not None:
            raise error
        return result

    return call


@pytest.fixture
def public_path():
    """A temporary folder that other users may enter, unlike `tmp_path`."""
    path = Path(tempfile.mkdtemp(prefix="curvature-gap-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server():
    """A local HTTP server: `server.files` maps a path to its content; `server.asked` lists what was asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            instance.asked.append(self.path)
            content = instance.files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write((content or b"")[: instance.cut])

        def log_message(self, *_):
            pass

    instance = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    instance.files, instance.asked, instance.cut = {}, [], None
    instance.url = f"http://127.0.0.1:{instance.server_address[1]}"
    thread = threading.Thread(target=instance.serve_forever)
    thread.start()
    yield instance
    instance.shutdown()
    thread.join()
    instance.server_close()
