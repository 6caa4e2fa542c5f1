"""What a machine with a GPU and without a network lacks for `python -m bench.gpu`, in one file.

    python -m bench.gpu carry FOLDER        writes FOLDER/site.zip, here, with a network
    python -m bench.gpu --carried FOLDER    unpacks it, there, and runs the parts with it

The machine has Python 3.12, torch 2.11.0 for CUDA 13, and the packages around torch. SGLang 0.5.16
and its kernels are built for that torch; of the kernels only what a Hopper GPU needs comes along.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["SERVER_ARGS", "SGLANG", "in_use", "make", "use"]

SGLANG = "0.5.16"
SERVER_ARGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),  # no flash_ops, FlashInfer
    *("--cuda-graph-max-bs", "64", "--disable-piecewise-cuda-graph"),  # a start takes less time
)

# How SGLang 0.5.16 differs from 0.5.23, for which the client is written. The first six are put
# right in its files; without spans, `pause` checks tokens only.
#
# | what | 0.5.16 | 0.5.23 |
# |---|---|---|
# | GET /ready | missing | 200 once requests are taken |
# | --prefill-decode-interval and -min-bs, on a CPU | missing | known |
# | a checksum of the weights, on a CPU | waits for CUDA, and fails | works |
# | new weights while requests wait, paused | the server dies | the cache is flushed |
# | parallelism_info of a checksum | an object | a list of one |
# | transformers 5.17 | registers a type of model twice, and fails | |
# | weight_versions in the last frame | missing | a span of tokens for each version |
# | /begin_weight_update, /end_weight_update | missing | needed for a broadcast |
_ENTRY, _READY = (
    '@app.get("/health")\n@app.get("/health_generate")\n',
    """\
@app.get("/ready")
async def ready() -> Response:
    starting = _global_state.tokenizer_manager.server_status == ServerStatus.Starting
    return Response(status_code=503 if starting else 200)


""",
)
_PARSE, _IGNORED = "    raw_args = parser.parse_args(argv)\n", '''\
    for name in ("--prefill-decode-interval", "--prefill-decode-interval-min-bs"):
        parser.add_argument(name)
'''  # fmt: skip
_FIXES = {
    "sglang/srt/entrypoints/http_server.py": {
        _ENTRY: _READY + _ENTRY,
        '        body["ranks"] = ranks\n': """\
        body["ranks"] = [rank | {"parallelism_info": [rank["parallelism_info"]]} for rank in ranks]
""",
    },
    "sglang/srt/server_args.py": {_PARSE: _IGNORED + _PARSE},
    "sglang/srt/managers/scheduler.py": {
        "        idle &= len(self.waiting_queue) == 0\n": (
            "        idle &= self._engine_paused or len(self.waiting_queue) == 0\n"
        ),
    },
    "sglang/srt/utils/weight_checker.py": {  # where it takes the time of a checksum
        f"        torch.cuda.synchronize()\n        {name} =": f"        {name} ="
        for name in ("start", "elapsed")
    },
    "sglang/srt/configs/qwen3_asr.py": {
        f'AutoConfig.register("{name}", {kind})': f'AutoConfig.register("{name}", {kind}, True)'
        for name, kind in (
            ("qwen3_asr", "Qwen3ASRConfig"), ("qwen3_asr_thinker", "Qwen3ASRThinkerConfig")
        )
    },
}  # fmt: skip

_STAND_INS = ("flashinfer", "IPython", "watchfiles", "zstandard")
_LEFT_OUT = (
    *("sgl_kernel/flash_ops*", "sgl_kernel/infllm_ops*", "sgl_kernel/flashmla_ops*"),
    *("sgl_kernel/sm100/*", "*.data/*", "sglang/test/*", "test/*", "tools/*"),
)
_SOURCES = ("deepspeed==0.19.8",)  # has no wheel
_WHEELS = f"""
sglang=={SGLANG} sglang-kernel==0.4.5 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0
gguf==0.19.0 openai==2.6.1 soundfile==0.13.1 torch-memory-saver==0.0.10 xgrammar==0.2.7
cffi==2.1.1 dill==0.4.1 distro==1.9.0 fastapi==0.121.3 starlette==0.50.0 annotated-doc==0.0.4
jiter==0.19.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 loguru==0.7.3 msgspec==0.22.0
partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pycparser==3.12 python-multipart==0.0.34
pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1
uvicorn==0.54.0 aiodocker==0.27.0 antlr4-python3-runtime==4.13.2 httptools==0.9.0
latex2sympy2-extended==1.11.0 math-verify==0.9.0 hjson==3.1.0 annotated-types==0.8.0
orjson==3.13.0 pydantic==2.14.4 pydantic-core==2.50.5 pydantic-settings==2.16.3
python-dotenv==1.2.4 structlog==26.1.0 typing-inspection==0.4.5
""".split()
_PLATFORMS = (
    *(f"manylinux_2_{n}_x86_64" for n in (34, 28, 27, 26, 24, 17)),
    "manylinux2014_x86_64",
)


def in_use() -> bool:
    """Return whether the SGLang of this process is the one that was carried along."""
    try:
        return importlib.metadata.version("sglang") == SGLANG
    except importlib.metadata.PackageNotFoundError:
        return False


def use(folder: Path, site: Path) -> None:
    """Unpack `folder` into `site`, in front of the packages of this process and of its children."""
    with zipfile.ZipFile(folder / "site.zip") as archive:
        archive.extractall(site)
    sys.path.insert(0, str(site))
    path = [str(Path.cwd()), str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"


def make(folder: Path, fixes: Mapping[str, Mapping[str, str]] = _FIXES) -> Path:
    """Fetch the packages and write those parts that are needed into `folder`/site.zip.

    Raises:
        ValueError: A file is not what a fix expects.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-carry-") as wheels:
        _fetch(wheels)
        pack(sorted(Path(wheels).glob("*.whl")), folder / "site.zip", fixes)
    return folder / "site.zip"


def _fetch(wheels: str) -> None:
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    target = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    for platform in (*_PLATFORMS, "any"):
        target += ["--platform", platform]
    subprocess.run([*pip, "download", "--no-deps", *target, "-d", wheels, *_WHEELS], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, *_SOURCES], check=True)


def pack(wheels: list[Path], target: Path, fixes: Mapping[str, Mapping[str, str]]) -> None:
    """Write the needed files of these wheels, fixed, and the stand-ins."""
    due = dict(fixes)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as source:
                for name in source.namelist():
                    if any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_OUT):
                        continue
                    content = source.read(name)
                    for old, new in due.pop(name, {}).items():
                        if content.count(old.encode()) != 1:
                            raise ValueError(f"{wheel.name}: {name} has no, or several: {old}")
                        content = content.replace(old.encode(), new.encode())
                    archive.writestr(name, content)
        ours = importlib.metadata.distribution("agentloop-rl")  # there, a folder and not installed
        for name in ("METADATA", "entry_points.txt"):
            archive.writestr(f"agentloop_rl.dist-info/{name}", ours.read_text(name) or "")
        stand_in = (Path(__file__).parent / "stand_in" / "__init__.py").read_bytes()
        for package in _STAND_INS:
            archive.writestr(f"{package}/__init__.py", stand_in)
    if due:
        raise ValueError(f"no wheel has {', '.join(due)}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu carry", description=make.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".gpu"))
    file = make(parser.parse_args(arguments).folder)
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    print(f"{len(_WHEELS) + len(_SOURCES)} packages: {' '.join((*_WHEELS, *_SOURCES))}")
    print(f"without {', '.join(_LEFT_OUT)}; {', '.join(_STAND_INS)} are stand-ins")
    unpacked = sum(info.file_size for info in infos)
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB, {unpacked / 2**20:.0f} unpacked")
    return 0
