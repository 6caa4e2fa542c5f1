"""The image's recipe: its tag, and which packages pip is asked for. The build itself is among the
integration tests."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path

import pydantic
import pytest

from agentloop.sandbox import Pool, PoolSettings, SandboxUnavailable
from agentloop.sandbox.image import build
from agentloop.sandbox.image.build import Python, image_tag
from agentloop.sandbox.process import not_installed
from tests.sandbox.conftest import BARE

PYTHON = Python(python="3.13", machine="x86_64", glibc="2.36", target="/usr/lib/python3")


def test_tag_depends_on_the_packages_and_not_on_their_order() -> None:
    tags = {image_tag(), image_tag(["a"]), image_tag(["a==1"]), image_tag(["a", "b"])}
    assert len(tags) == 4
    assert image_tag(["a", "b"]) == image_tag(["b", "a"])
    assert image_tag([]) == image_tag()
    debian = image_tag(["debian:a", "debian:b"])
    assert debian == image_tag(["debian:b", "debian:a"])
    assert debian not in {*tags, image_tag(["debian:a"])}


def test_tag_depends_on_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "recipe"
    for name in ("DOCKERFILE", "REQUIREMENTS"):
        file = getattr(build, name)
        before = image_tag()
        changed.write_text(file.read_text() + "# changed\n")
        with monkeypatch.context() as patched:
            patched.setattr(build, name, changed)
            assert image_tag() != before


def test_dockerfiles_base_is_found() -> None:
    assert build._dockerfile_base().startswith("python:3.13-slim")


def test_wheels_are_those_that_the_base_can_run() -> None:
    platforms = PYTHON.platforms()
    assert platforms[0] == "manylinux_2_36_x86_64"
    assert platforms[-2:] == ["manylinux_2_17_x86_64", "manylinux2014_x86_64"]


def make_wheel(folder: Path, name: str, version: str, needs: str = "") -> str:
    """Create a wheel and return its hash."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}/__init__.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{path},sha256={digest.decode()},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def only_local_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let pip find only alpha 1 and 2, of which the recipe pins the first, and beta, which
    needs any alpha."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pinned = make_wheel(wheels, "alpha", "1.0")
    make_wheel(wheels, "alpha", "2.0")
    make_wheel(wheels, "beta", "1.0", needs="alpha")
    make_wheel(wheels, "newer", "1.0", needs="alpha>=2")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"alpha==1.0 \\\n    --hash=sha256:{pinned}\n")
    monkeypatch.setattr(build, "REQUIREMENTS", requirements)
    return wheels


@pytest.mark.timeout(60)
@pytest.mark.full
async def test_added_packages_use_pinned_versions(only_local_wheels: Path, tmp_path: Path) -> None:
    await build._fetch(PYTHON, ["beta"], tmp_path)
    result = sorted(path.name for path in (tmp_path / "site").iterdir())
    assert result == ["alpha", "alpha-1.0.dist-info", "beta", "beta-1.0.dist-info"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["environment", "file"])
async def test_constraints_of_the_caller_do_not_hold(
    only_local_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    constraints = tmp_path / "pins.txt"
    constraints.write_text("alpha==2.0\n")
    if place == "environment":
        monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    else:
        configuration = tmp_path / "pip.conf"
        configuration.write_text(f"[global]\nconstraint = {constraints}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    await build._fetch(PYTHON, [], tmp_path)
    assert (tmp_path / "site" / "alpha-1.0.dist-info").is_dir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wrong", ["another hash", "a version that is pinned", "a missing package"])
@pytest.mark.full
async def test_packages_that_cannot_be_fetched_are_named(
    only_local_wheels: Path, tmp_path: Path, wrong: str
) -> None:
    packages, says = ["nowhere"], "nowhere"
    if wrong == "another hash":
        make_wheel(only_local_wheels, "alpha", "1.0", needs="beta")
        says = "its packages"
    elif wrong == "a version that is pinned":
        packages, says = ["newer"], "newer"
    with pytest.raises(SandboxUnavailable, match=rf"pip can't fetch {says} for the sandbox image"):
        await build._fetch(PYTHON, packages, tmp_path)


def test_without_pip_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match="-m ensurepip"):
        build._find_pip()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"packages": ["--index-url=http://x"]}, "--index-url=http://x' is not a valid"),
        ({"packages": ["a", "../b"]}, "'../b' is not a valid requirement"),
        ({"packages": ["a"], "image": "mine"}, "not to 'mine'"),
        ({"packages": ["debian:g++; rm"]}, "is not a valid requirement"),
    ],
)
def test_packages_are_checked(settings: dict[str, object], says: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="packages") as caught:
        PoolSettings.model_validate(settings)
    assert says in str(caught.value)


def test_missing_packages_of_this_python_are_found() -> None:
    wanted = ["anyio", "anyio>=4", "anyio<1", "no-such-package"]
    assert not_installed(wanted) == ["anyio<1", "no-such-package"]


@pytest.mark.timeout(60)
async def test_local_processes_need_the_packages_here() -> None:
    with pytest.raises(SandboxUnavailable, match="-m pip install no-such-package"):
        async with Pool(BARE.model_copy(update={"packages": ["no-such-package"]})):
            pass
    async with Pool(BARE.model_copy(update={"packages": ["anyio"]})) as pool:
        assert (await pool.run("6 * 7")).result == "42"
