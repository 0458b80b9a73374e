"""What turns builds into a release: readable descriptions, variants, checks of version and changelog."""

import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from programs import load_program

SCRIPTS = Path(__file__).parents[3] / "scripts"
METADATA = """Metadata-Version: 2.4
Name: moegemm
Version: 0.1.0
{urls}
# moegemm

[In a model](docs/a.md), [`examples`](examples/x.cpp), [out](https://example.org), [here](#limits), ![plot](docs/p.png)
`W[0](x)` and
```python
h[0](y)
```
"""


finish = load_program("scripts/package/finish_distribution.py")
gpu_code = load_program("scripts/package/gpu_code.py")
release = load_program("scripts/release")


def metadata(urls: str = "") -> str:
    return METADATA.format(urls=urls)


def test_relative_links_become_text_while_there_is_no_address():
    text = finish.finished_metadata(metadata(), "")
    assert "In a model, `examples`, [out](https://example.org), [here](#limits), \n" in text
    assert "`W[0](x)` and\n```python\nh[0](y)\n```" in text


def test_relative_links_lead_to_the_repository():
    text = finish.finished_metadata(metadata("Project-URL: Repository, https://example.org/moegemm\n"), "")
    assert "[In a model](https://example.org/moegemm/blob/main/docs/a.md)" in text
    assert "![plot](https://example.org/moegemm/raw/main/docs/p.png)" in text


def test_wheel_of_a_variant_has_its_version_everywhere(tmp_path):
    path = tmp_path / "moegemm-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("moegemm/", "")
        wheel.writestr("moegemm/__init__.py", "x = 1\n")
        wheel.writestr("moegemm-0.1.0.dist-info/METADATA", metadata())
        wheel.writestr("moegemm-0.1.0.dist-info/RECORD", "old")
    finished = finish.finish_wheel(path, "cpu")
    assert finished.name == "moegemm-0.1.0+cpu-py3-none-manylinux_2_28_x86_64.whl"
    assert not path.exists()
    with zipfile.ZipFile(finished) as wheel:
        names = wheel.namelist()
        record = wheel.read("moegemm-0.1.0+cpu.dist-info/RECORD").decode()
        assert b"\nVersion: 0.1.0+cpu\n" in wheel.read("moegemm-0.1.0+cpu.dist-info/METADATA")
    assert sorted(line.split(",")[0] for line in record.splitlines()) == sorted(names)
    assert "moegemm/" not in names


def test_source_package_gets_a_readable_description(tmp_path):
    path = tmp_path / "moegemm-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as sdist:
        for name, text in (("moegemm-0.1.0/PKG-INFO", metadata()), ("moegemm-0.1.0/README.md", "[a](docs/a.md)")):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            sdist.addfile(entry, io.BytesIO(text.encode()))
    with tarfile.open(finish.finish_sdist(path)) as sdist:
        assert b"In a model, " in sdist.extractfile("moegemm-0.1.0/PKG-INFO").read()
        assert sdist.extractfile("moegemm-0.1.0/README.md").read() == b"[a](docs/a.md)"


def test_the_wheel_without_kernels_leaves_the_other_where_it_is(tmp_path):
    """In a checkout whose pip and auditwheel copy a wheel that is there already."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    with zipfile.ZipFile(tmp_path / "built.whl", "w") as wheel:
        wheel.writestr("moegemm-0.1.0.dist-info/METADATA", metadata())
    stand_in = """#!/usr/bin/env bash
while [ "$1" != --wheel-dir ]; do shift; done
mkdir -p "$2" && cp built.whl "$2/moegemm-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
"""
    for name in ("python", "auditwheel"):
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(stand_in)
        program.chmod(0o755)
    with_kernels = tmp_path / "dist" / "moegemm-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with_kernels.parent.mkdir()
    with_kernels.write_text("with kernels")
    subprocess.run([tmp_path / "scripts" / "package" / "wheel", "cpu"], check=True, capture_output=True)
    assert with_kernels.read_text() == "with kernels"
    assert zipfile.is_zipfile(with_kernels.with_name("moegemm-0.1.0+cpu-py3-none-manylinux_2_28_x86_64.whl"))


def pack_cpp(root: Path, information: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """`scripts/package/cpp` in a checkout whose tools are stand-ins; how it ended, and what CMake was told."""
    shutil.copytree(SCRIPTS, root / "scripts", dirs_exist_ok=True)
    library = fat_binary((80, False, False), (90, False, False), (80, True, False))
    (root / "library").write_bytes(library)
    stand_ins = {
        "cmake": f"""echo "$*" >>told
if [ "$1" = --build ]; then
  mkdir -p build/package/src/cli && cp library build/package/src/libmoegemm.so
  echo 'echo "build    gcc, {information}"' >build/package/src/cli/moegemm && chmod +x build/package/src/cli/moegemm
fi""",
        "cpack": 'mkdir -p "$4" && touch "$4/moegemm.tar.gz" && echo "CPack: - package: $4/moegemm.tar.gz generated."',
        "objdump": "echo '(GLIBC_2.4) x'; echo '(GLIBC_2.34) y'; echo '(GLIBCXX_3.4.9) z'",
    }
    for name, text in stand_ins.items():
        program = root / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    where = {**os.environ, "PATH": f"{root / 'bin'}:{os.environ['PATH']}", **environment}
    command = [root / "scripts" / "package" / "cpp"]
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    return done, (root / "told").read_text()


def test_packages_are_for_the_gpus_that_are_named(tmp_path):
    done, told = pack_cpp(tmp_path, "CUDA 13.0", CUDA="", CUDA_ARCHS="80,90")
    assert done.returncode == 0, done.stderr
    assert "-DMOEGEMM_CUDA=ON -DMOEGEMM_CUDA_ARCHS=80;90" in told
    assert (tmp_path / "dist" / "moegemm.tar.gz").is_file()
    assert "needs GLIBC_2.34 and GLIBCXX_3.4.9\n" in done.stdout
    makefile = (SCRIPTS.parent / "Makefile").read_text()
    assert '@CUDA="$(CUDA)" CUDA_ARCHS="$(CUDA_ARCHS)" scripts/package/cpp' in makefile


def test_packages_whose_kernels_lack_a_gpu_are_not_made(tmp_path):
    done, told = pack_cpp(tmp_path, "CUDA 13.0", CUDA="AUTO", CUDA_ARCHS="")
    assert done.returncode == 1
    assert "a fat binary lacks sm_86, sm_89, sm_100, sm_120" in done.stderr
    assert "-DMOEGEMM_CUDA=AUTO -DMOEGEMM_CUDA_ARCHS=all" in told
    assert list((tmp_path / "dist").iterdir()) == []
    assert pack_cpp(tmp_path, "without CUDA", CUDA="OFF", CUDA_ARCHS="")[0].returncode == 0


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CMakeLists.txt").write_text("project(moegemm VERSION 1.2.3 LANGUAGES CXX)\n")
    (tmp_path / "python" / "moegemm").mkdir(parents=True)
    (tmp_path / "python" / "moegemm" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n### Added\n- A thing.\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "DIST", tmp_path)
    monkeypatch.setattr(release, "run", lambda *command, **options: "")
    return tmp_path


def test_release_that_is_in_order_passes(checkout):
    release.check_version("1.2.3")
    release.check_changelog("1.2.3")


@pytest.mark.parametrize("name", ["pyproject.toml", "CMakeLists.txt", "python/moegemm/__init__.py"])
def test_release_refuses_versions_that_differ(name, checkout):
    (checkout / name).write_text((checkout / name).read_text().replace("1.2.3", "1.2.2"))
    with pytest.raises(release.ReleaseError, match=rf"{name} has version 1.2.2, not 1.2.3"):
        release.check_version("1.2.3")


def test_check_of_an_installed_package_passes_with_this_one():
    code = release.CHECK.replace('"site-packages"', '"moegemm"')
    found = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("on c")


def test_release_refuses_a_changelog_without_its_section_or_with_leftovers(checkout):
    with pytest.raises(release.ReleaseError, match="no section"):
        release.check_changelog("1.2.4")
    text = (checkout / "CHANGELOG.md").read_text().replace("[Unreleased]\n", "[Unreleased]\n\n### Fixed\n- Another.\n")
    (checkout / "CHANGELOG.md").write_text(text)
    with pytest.raises(release.ReleaseError, match="under Unreleased"):
        release.check_changelog("1.2.3")


def test_release_takes_the_oldest_and_the_newest_torch(checkout, monkeypatch):
    listed = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.10.1, 2.10.0, 2.9.1\n"
    monkeypatch.setattr(release, "run", lambda *command, **options: listed)
    assert release.installable_torches() == ["2.10.0", "2.15.0"]


def test_checksums_are_those_of_sha256sum(checkout, monkeypatch):
    monkeypatch.setattr(release, "DIST", checkout / "dist")
    names = [name for made in release.artefacts("1.2.3").values() for name in made]
    (checkout / "dist" / "hub").mkdir(parents=True)
    for name in names:
        (checkout / "dist" / name).write_text("abc")
    release.write_checksums("1.2.3")
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=checkout / "dist", check=True, capture_output=True)
    assert len((checkout / "dist" / "SHA256SUMS").read_text().splitlines()) == len(names) == 5
    (checkout / "dist" / "a-1.2.2.whl").write_text("abc")
    with pytest.raises(release.ReleaseError, match=r"belong to no release of 1\.2\.3: a-1\.2\.2\.whl"):
        release.write_checksums("1.2.3")


def test_a_source_package_has_what_a_build_reads(checkout, monkeypatch):
    def listed(*command: str) -> str:
        assert {"cmake", "data", "src", "testing"} <= set(command)
        return "src/a.cpp\nsrc/b.cu\n"

    monkeypatch.setattr(release, "run", listed)
    package = checkout / "moegemm-1.2.3.tar.gz"
    for names in (["src/a.cpp"], ["src/a.cpp", "src/b.cu", "README.md"]):
        with tarfile.open(package, "w:gz") as out:
            for name in names:
                out.addfile(tarfile.TarInfo(f"moegemm-1.2.3/{name}"))
        if "src/b.cu" in names:
            release.check_sources(package)
        else:
            with pytest.raises(release.ReleaseError, match=r"moegemm-1\.2\.3\.tar\.gz lacks src/b\.cu"):
                release.check_sources(package)


class Steps:
    """A release whose steps note that they ran and leave files, in a tree of a commit or, without one, with changes."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commit, self.ran, self.dist = "abc", [], root / "dist"
        self.dist.mkdir()
        monkeypatch.setattr(release, "DIST", self.dist)
        monkeypatch.setattr(release, "PASSED", root / "build" / "release-steps.json")
        monkeypatch.setattr(release, "commit_of_tree", lambda: self.commit)
        stand_ins = {name: lambda version, name=name: self.stand_in(name, version) for name in release.STEPS}
        monkeypatch.setattr(release, "STEPS", stand_ins)

    def stand_in(self, name: str, version: str) -> None:
        self.ran.append(name)
        for made in release.artefacts(version).get(name, []):
            (self.dist / made).write_text(f"{made}, run {len(self.ran)}")

    def run(self, *names: str, version: str = "1.2.3", rehearsed: bool = False) -> None:
        for name in names:
            release.run_step(name, version, rehearsed)


@pytest.fixture
def steps(checkout, monkeypatch) -> Steps:
    return Steps(checkout, monkeypatch)


def test_checksums_need_every_step_of_one_commit_in_one_run_or_several(steps):
    *others, last = release.STEPS
    steps.run(*others[:3])
    with pytest.raises(release.ReleaseError, match="not passed for this commit: tests,wheels,environments,packages"):
        steps.run(last)
    assert last not in steps.ran
    steps.run(*others[3:], last)
    assert steps.ran == list(release.STEPS)
    for commit, version in (("def", "1.2.3"), ("abc", "1.2.4")):
        steps.commit = commit
        with pytest.raises(release.ReleaseError, match="not passed for this commit: version,changelog,tree,"):
            steps.run(last, version=version)


def test_a_rehearsal_counts_for_nothing(steps):
    steps.run(*release.STEPS, rehearsed=True)
    assert steps.ran == list(release.STEPS)
    with pytest.raises(release.ReleaseError, match="not passed for this commit: version,changelog,tree,"):
        steps.run("checksums")


def test_a_rehearsal_is_not_taken_for_what_passed_before(steps):
    *others, last = release.STEPS
    steps.run(*others)
    steps.run("changelog", rehearsed=True)
    steps.run(last)
    steps.run("wheels", rehearsed=True)
    with pytest.raises(release.ReleaseError, match="not passed for this commit: wheels,environments,packages"):
        steps.run(last)


def test_a_step_that_runs_again_makes_later_ones_run_again(steps):
    *others, last = release.STEPS
    steps.run(*others)
    steps.run("wheels")
    with pytest.raises(release.ReleaseError, match="not passed for this commit: environments,packages"):
        steps.run(last)


@pytest.mark.parametrize("step", ["wheels", "packages"])
def test_what_a_step_made_must_still_be_there_and_the_same(steps, step):
    *others, last = release.STEPS
    steps.run(*others)
    made = steps.dist / release.artefacts("1.2.3")[step][0]
    made.write_text("of another build")
    with pytest.raises(release.ReleaseError, match=f"in dist/ is not what the step '{step}' made"):
        steps.run(last)
    made.unlink()
    with pytest.raises(release.ReleaseError, match="dist/ lacks moegemm"):
        steps.run(last)


def test_environments_are_not_checked_with_wheels_of_another_build(steps):
    steps.run("wheels")
    (steps.dist / release.artefacts("1.2.3")["wheels"][1]).write_text("of another build")
    with pytest.raises(release.ReleaseError, match="is not what the step 'wheels' made"):
        steps.run("environments")
    assert "environments" not in steps.ran


def test_a_step_that_makes_too_little_fails(steps, monkeypatch):
    monkeypatch.setitem(release.STEPS, "wheels", lambda version: None)
    with pytest.raises(
        release.ReleaseError, match=r"dist/ lacks moegemm-1\.2\.3-py3-none-manylinux_2_28_x86_64\.whl, "
    ):
        steps.run("wheels")


def test_nothing_that_passes_with_uncommitted_changes_counts(steps):
    steps.commit = ""
    *others, last = release.STEPS
    steps.run(*others)
    with pytest.raises(release.ReleaseError, match="not passed"):
        steps.run(last)


def fat_binary(*images: tuple[int, bool, bool], payload: bytes = bytes(24)) -> bytes:
    """As nvcc writes it, with (architecture, PTX, of this architecture alone) for each image."""
    whole = b""
    for arch, ptx, exact in images:
        head = struct.pack("<HHIQIIIIIIQQQ", 1 if ptx else 2, 1, 64, len(payload), 20, 0, 0, arch, 0, 0, 0, 0, 100)
        flags = gpu_code.EXACT * exact | (1 << 15)
        whole += head[:40] + struct.pack("<Q", flags) + head[48:] + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole)) + whole


def test_gpu_code_of_a_library_is_found():
    data = fat_binary((80, False, False), (80, True, False)) + b"between" + fat_binary((90, False, True)) + b"end"
    first, second = gpu_code.fat_binaries(b"ELF" + data)
    assert [(image.arch, image.ptx, image.exact) for image in first] == [(80, False, False), (80, True, False)]
    assert second == [gpu_code.Image(arch=90, ptx=False, exact=True, stored_bytes=24, bytes=100)]


@pytest.mark.parametrize(
    ("images", "missing"),
    [
        ([(80, False, False), (90, False, False), (120, False, False), (80, True, False)], []),
        ([(90, False, False), (120, False, False), (90, True, False)], []),  # for 9.0 and newer
        ([(90, False, True)], []),  # for 9.0 alone
        ([(80, False, False), (120, False, False), (80, True, False)], ["sm_90"]),
        ([(80, False, False), (90, False, False), (120, False, False)], ["PTX"]),
        ([(80, True, False)], ["sm_80", "sm_90", "sm_120"]),
        ([(121, True, False)], []),  # for newer ones than are wanted
    ],
)
def test_gpu_that_would_compile_at_its_first_call_is_named(images, missing):
    (found,) = gpu_code.fat_binaries(fat_binary(*images))
    assert gpu_code.missing_code(found, [80, 90, 120]) == missing
