"""What the make commands run: progress on a terminal, what is compiled for whom, one sentence where nothing works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import on_terminal

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
SLOW_NINJA = "echo '[76/240] Building a'; echo '[77/240] Building b'; sleep 2.5"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_long_step_shows_where_it_is_on_a_terminal(tmp_path):
    shown = on_terminal(SCRIPTS / "step", "Compile", tmp_path / "log", "bash", "-c", SLOW_NINJA)
    assert re.search(r"[1-9] s  77 of 240", shown)
    assert re.search(r"ok +\d+ s\s*$", shown)


def test_long_step_is_one_line_in_a_log(tmp_path):
    done = run(SCRIPTS / "step", "Compile", tmp_path / "log", "bash", "-c", SLOW_NINJA)
    (line,) = done.stdout.splitlines()
    assert line.startswith("Compile ")
    assert "240" not in line
    assert "\r" not in done.stdout


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("  [77/240] Building CXX object a.o", "77 of 240"),  # ninja, as pip shows it
        ("Collecting numpy>=1.26", "numpy"),
        ("Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (190 MB)", "torch-2.13.0"),
        ("Installing collected packages: mpmath, sympy, torch", "installing 3 packages"),
        ("  12/300 Test #12: cpu_test ... Passed", "12 of 300"),
        ("tests/python/a.py ......      [ 45%]", "45%"),
        ("Get:12 http://deb.debian.org/debian stable/main amd64 libfmt-dev amd64 9.1 [9 kB]", "fetching libfmt-dev"),
        ("Get:1 http://deb.debian.org/debian bookworm InRelease [151 kB]", "fetching bookworm"),
        ("Unpacking libfmt9:amd64 (9.1.0+ds1-2) ...", "unpacking libfmt9"),
        ("Setting up libfmt9:amd64 (9.1.0+ds1-2) ...", "setting up libfmt9"),
    ],
)
def test_progress_of_every_kind_of_step_is_read(printed, shown, tmp_path):
    assert shown in on_terminal(SCRIPTS / "step", "x", tmp_path / "log", "bash", "-c", f"echo '{printed}'; sleep 1.5")


def test_lint_counts_the_files_that_clang_tidy_reads(tmp_path):
    for name in ("step", "lint"):
        program(tmp_path / "scripts" / name, (SCRIPTS / name).read_text().partition("\n")[2])
    for name in (".venv/bin/clang-format", ".venv/bin/ruff"):
        program(tmp_path / name, "true")
    program(tmp_path / "bin" / "clang-tidy", "echo found; [[ ${!#} != */bad.cpp ]]")
    program(tmp_path / "bin" / "git", "echo src/a.cpp; echo src/bad.cpp")
    commands = [f'"file": "{tmp_path}/src/{name}.cpp"' for name in ("a", "bad")]
    for folder, text in ((commands, "LINT FOUND PROBLEMS."), (commands[:1], "Lint is clean."), ([], "Lint is clean.")):
        (tmp_path / "build" / "lint").mkdir(parents=True, exist_ok=True)
        (tmp_path / "build" / "lint" / "compile_commands.json").write_text("\n".join(folder))
        done = run(tmp_path / "scripts" / "lint", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        assert done.stdout.endswith(f"{text}\n")
        counted = re.findall(r"^\[.*", (tmp_path / "build" / "logs" / "lint-tidy.log").read_text(), re.MULTILINE)
        expected = [f"[{at}/{len(folder)}] src/{name}.cpp" for at, name in enumerate(("a", "bad"), start=1)]
        assert sorted(counted) == expected[: len(folder)]


@pytest.mark.parametrize(("columns", "most"), [(0, 79), (60, 59)])
def test_progress_fits_into_one_line_of_the_terminal(columns, most, tmp_path):
    slow = f"echo 'Downloading {'a-long-name-' * 9}'; sleep 1.5"
    shown = on_terminal(SCRIPTS / "step", "x", tmp_path / "log", "bash", "-c", slow, columns=columns)
    lines = re.split(r"[\r\n]|\x1b\[K", shown)
    assert max(map(len, lines)) == most


def test_of_two_steps_at_a_time_one_shows_its_progress(tmp_path):
    quiet = {"STEP_IN_PARALLEL": "1", "STEP_QUIET": "1"}
    shown = on_terminal(SCRIPTS / "step", "Install", tmp_path / "log", "bash", "-c", SLOW_NINJA, **quiet)
    assert shown.startswith("\r\x1b[KInstall ")  # over the other's line
    assert "240" not in shown
    other = on_terminal(SCRIPTS / "step", "Compile", tmp_path / "log", "bash", "-c", SLOW_NINJA, STEP_IN_PARALLEL="1")
    assert "77 of 240" in other
    in_a_log = run(SCRIPTS / "step", "Compile", tmp_path / "log", "echo", STEP_IN_PARALLEL="1").stdout
    assert re.fullmatch(r"Compile +ok +\d+ s\n", in_a_log)
    makefile = (ROOT / "Makefile").read_text()
    assert len(re.findall(r'\$\(VENV_STEP\) "(?:Virtual environment|The library of the Hub)', makefile)) == 3
    assert "STEP_QUIET" not in makefile.split("\nVENV_STEP := ")[1].partition("\n")[2]


def test_failed_step_shows_the_end_of_its_log(tmp_path):
    done = run(SCRIPTS / "step", "Compile", tmp_path / "log", "bash", "-c", "echo why; exit 7")
    assert done.returncode == 7
    assert "FAILED after 0 s (exit code 7)" in done.stdout
    assert done.stdout.endswith("why\n")


class Machine:
    """A checkout with nothing built, on a path with and without a GPU."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder, folder / "bin"
        (folder / "scripts" / "gpu").mkdir(parents=True)
        for name in ("release_options", "gpu/usable_nvcc"):
            shutil.copy(SCRIPTS / name, folder / "scripts" / name)

    def with_gpus(self, *capabilities: str) -> None:
        program(self.bin / "nvidia-smi", "\n".join(f"echo {c}" for c in capabilities))
        program(self.bin / "nvcc", "true")

    def built(self, words: str, **cached: str) -> None:
        release = self.root / "build" / "release"
        program(release / "src" / "cli" / "moegemm", f"echo 'build    gcc, Release, {words}'")
        (release / "CMakeCache.txt").write_text("".join(f"{name}:STRING={value}\n" for name, value in cached.items()))

    def options(self, purpose: str, cuda: str = "", archs: str = "", asked: str = "options") -> str:
        path = f"{self.bin}:/usr/bin:/bin"
        done = run(self.root / "scripts" / "release_options", purpose, cuda, archs, asked, PATH=path, CUDACXX="")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_demo_without_a_gpu_compiles_no_kernels_and_no_tests(machine):
    program(machine.bin / "nvcc", "true")
    assert machine.options("demo") == "-DMOEGEMM_BUILD_TESTS=OFF -DMOEGEMM_CUDA=OFF"
    assert machine.options("demo", cuda="AUTO") == machine.options("demo")


def test_demo_compiles_kernels_for_the_gpus_that_are_here(machine):
    machine.with_gpus("9.0", "8.6", "9.0", "7.5")
    assert machine.options("demo").endswith("-DMOEGEMM_CUDA=ON '-DMOEGEMM_CUDA_ARCHS=86;90'")


def test_whoever_asks_for_kernels_gets_them(machine):
    assert machine.options("demo", cuda="ON").endswith("-DMOEGEMM_CUDA=ON")
    assert machine.options("demo", archs="80,90").endswith("-DMOEGEMM_CUDA=ON '-DMOEGEMM_CUDA_ARCHS=80;90'")
    machine.with_gpus("9.0")
    assert machine.options("demo", cuda="OFF").endswith("-DMOEGEMM_CUDA=OFF")


OLD_NVCC = "echo 'Cuda compilation tools, release 12.4, V12.4.131'"


def test_nvcc_that_is_too_old_is_as_none(machine):
    machine.with_gpus("9.0")
    program(machine.bin / "nvcc", OLD_NVCC)
    assert machine.options("demo").endswith("-DMOEGEMM_CUDA=OFF")
    assert machine.options("demo", asked="folder") == "build/release"
    assert machine.options("demo", cuda="ON").endswith("-DMOEGEMM_CUDA=ON")
    here = {"PATH": f"{machine.bin}:/usr/bin:/bin", "CUDACXX": ""}
    usable = [run(SCRIPTS / "gpu" / "usable_nvcc", **here).stdout]
    program(machine.bin / "nvcc", OLD_NVCC.replace("12.4", "13.1"))
    usable.append(run(SCRIPTS / "gpu" / "usable_nvcc", **here).stdout.strip())
    assert usable == ["", str(machine.bin / "nvcc")]


def test_nvcc_may_be_named_by_cudacxx(tmp_path):
    elsewhere = program(tmp_path / "elsewhere" / "nvcc", OLD_NVCC.replace("12.4", "13.1"))
    found = run(SCRIPTS / "gpu" / "usable_nvcc", PATH="/usr/bin:/bin", CUDACXX=str(elsewhere))
    assert found.stdout.strip() == str(elsewhere)


@pytest.mark.parametrize("cuda", ["AUTO", "ON"])
def test_cmake_leaves_kernels_out_where_nvcc_is_too_old_unless_they_are_asked_for(cuda, tmp_path):
    old = program(tmp_path / "nvcc", OLD_NVCC)
    options = [f"-DMOEGEMM_CUDA={cuda}", f"-DCMAKE_CUDA_COMPILER={old}", "-DMOEGEMM_BUILD_CLI=OFF"]
    done = run("cmake", "--preset", "release", "-S", ROOT, "-B", tmp_path, "-DMOEGEMM_BUILD_TESTS=OFF", *options)
    said = " ".join(done.stderr.split())
    assert f"nvcc 12.4 at {old} is too old: 13.0 or newer is needed" in said
    assert ("`make ... CUDA=OFF`" if cuda == "ON" else "CUDA kernels are left out") in said
    assert (done.returncode != 0) == (cuda == "ON")


@pytest.mark.parametrize(("archs", "expected"), [("86", False), ("80;90", True), ("all", True)])
def test_hopper_kernels_are_compiled_where_9_0_is_listed(archs, expected, tmp_path):
    if not run(SCRIPTS / "gpu" / "usable_nvcc").stdout:
        pytest.skip("no nvcc 13.0 or newer")
    options = ["-DMOEGEMM_CUDA=ON", f"-DMOEGEMM_CUDA_ARCHS={archs}", "-DMOEGEMM_BUILD_CLI=OFF"]
    done = run("cmake", "--preset", "release", "-S", ROOT, "-B", tmp_path, "-DMOEGEMM_BUILD_TESTS=OFF", *options)
    assert done.returncode == 0, done.stderr
    sources = {path.name.split("_")[0] for path in (tmp_path / "src" / "cuda" / "instances").iterdir()}
    assert sources == ({"sm80", "sm90"} if expected else {"sm80"})


def test_cmake_names_the_package_that_a_source_build_needs(tmp_path):
    without = ["-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON", "-DMOEGEMM_CUDA=OFF"]
    done = run("cmake", "--preset", "release", "-S", ROOT, "-B", tmp_path, *without)
    assert done.returncode != 0
    assert "install nlohmann-json3-dev" in " ".join(done.stderr.split())


def test_tests_are_complete(machine):
    assert machine.options("all") == "-DMOEGEMM_BUILD_TESTS=ON -DMOEGEMM_CUDA=AUTO '-DMOEGEMM_CUDA_ARCHS=80;90'"
    assert machine.options("all", cuda="OFF") == "-DMOEGEMM_BUILD_TESTS=ON -DMOEGEMM_CUDA=OFF"


def test_tests_are_complete_after_a_demo_for_one_gpu(machine):
    machine.built("CUDA 13.0", MOEGEMM_CUDA="ON", MOEGEMM_CUDA_ARCHS="86", MOEGEMM_BUILD_TESTS="OFF")
    assert machine.options("all").endswith("'-DMOEGEMM_CUDA_ARCHS=80;90'")


def test_tests_stay_with_the_gpus_that_they_were_built_for(machine):
    machine.built("CUDA 13.0", MOEGEMM_CUDA="ON", MOEGEMM_CUDA_ARCHS="90", MOEGEMM_BUILD_TESTS="ON")
    assert machine.options("all").endswith("'-DMOEGEMM_CUDA_ARCHS=90'")


def test_demo_takes_nothing_from_what_the_tests_built(machine):
    machine.with_gpus("9.0")
    machine.built("CUDA 13.0", MOEGEMM_CUDA="AUTO", MOEGEMM_CUDA_ARCHS="80;90", MOEGEMM_BUILD_TESTS="ON")
    assert machine.options("demo") == machine.options("all")
    assert machine.options("demo", asked="folder") == "build/release"


@pytest.mark.parametrize("built", ["CUDA 13.0", "without CUDA"], ids=["whole", "interrupted"])
def test_demo_without_a_gpu_stays_apart_from_kernels_that_tests_compile(machine, built):
    program(machine.bin / "nvcc", "true")
    machine.built(built, MOEGEMM_CUDA="AUTO", MOEGEMM_BUILD_TESTS="ON")
    assert machine.options("demo") == "-DMOEGEMM_BUILD_TESTS=OFF -DMOEGEMM_CUDA=OFF"
    assert machine.options("demo", asked="folder") == "build/cpu"
    assert machine.options("all", asked="folder") == machine.options("demo", "ON", asked="folder") == "build/release"


def test_without_nvcc_demo_and_tests_share_what_they_compile(machine):
    machine.built("without CUDA", MOEGEMM_CUDA="AUTO", MOEGEMM_BUILD_TESTS="ON")
    assert machine.options("demo") == "-DMOEGEMM_BUILD_TESTS=ON -DMOEGEMM_CUDA=OFF"
    assert machine.options("demo", asked="folder") == "build/release"


def test_caches_leave_a_home_that_cannot_be_written_to():
    homeless = {k: v for k, v in os.environ.items() if k != "CCACHE_DIR"} | {"HOME": "/nonexistent"}
    command = ["make", "-s", "-C", str(ROOT), "--eval", "show:;@echo $(CCACHE_DIR)", "show"]
    answer = subprocess.run(command, env=homeless, capture_output=True, text=True, check=True).stdout
    assert answer.strip() == str(ROOT / "build" / "ccache")


def test_missing_packages_without_root_are_named(tmp_path):
    (tmp_path / "list.txt").write_text(
        "libnothing-dev  header nothing/at/all.h\nno-compiler  command no-such-compiler\n"
    )
    program(tmp_path / "bin" / "id", "echo 1000")
    program(tmp_path / "bin" / "sudo", "exit 1")
    done = run(
        SCRIPTS / "install_system_packages", tmp_path / "list.txt", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    )
    assert done.returncode == 1
    assert "sudo apt-get install --no-install-recommends libnothing-dev no-compiler" in done.stderr


def test_modules_are_looked_for_in_the_python_that_is_named(tmp_path):
    (tmp_path / "list.txt").write_text("python3-venv  module no_such_module\n")
    has_it = program(tmp_path / "python", "exit 0")
    assert run(SCRIPTS / "install_system_packages", tmp_path / "list.txt", PYTHON=str(has_it)).returncode == 0


def test_packages_that_apt_cannot_fetch_are_named(tmp_path):
    (tmp_path / "list.txt").write_text("libnothing-dev  header nothing/at/all.h\n")
    program(tmp_path / "bin" / "id", "echo 0")
    program(tmp_path / "bin" / "apt-get", 'echo "Could not resolve deb.debian.org" >&2; exit 100')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run(SCRIPTS / "install_system_packages", tmp_path / "list.txt", PATH=path)
    assert done.returncode == 1
    assert "Could not resolve deb.debian.org" in done.stderr
    assert "apt-get could not install libnothing-dev (above is why). Without a network, install" in done.stderr


def test_every_pip_of_make_says_how_to_do_without_a_network(tmp_path):
    offline = program(tmp_path / "python", 'echo "no route to host" >&2; exit 1')
    done = run(SCRIPTS / "pip_install", offline, "the tools for the wheel", "--upgrade", "-r", "requirements/wheel.txt")
    assert done.returncode == 1
    assert "pip could not install the tools for the wheel (above is why). Without a network, run" in done.stderr
    assert "'pip download -r requirements/wheel.txt'" in done.stderr
    assert "PIP_FIND_LINKS=/path" in done.stderr
    assert "pip install" not in (ROOT / "Makefile").read_text()


def test_step_that_may_fail_says_what_is_left_out(tmp_path):
    done = run(SCRIPTS / "step", "Hub", tmp_path / "log", "false", STEP_OPTIONAL="one test is skipped")
    assert done.returncode == 0
    assert re.fullmatch(rf"Hub +left out: one test is skipped \(why: {tmp_path}/log\)\n", done.stdout)


def test_no_network_says_how_to_do_without(tmp_path):
    program(tmp_path / "venv" / "bin" / "python", 'case "$*" in *pip*) echo "no route to host" >&2; exit 1;; esac')
    bare = program(tmp_path / "bare", f'exec "{sys.executable}" -I -S "$@"')  # a Python without torch
    done = run(SCRIPTS / "make_venv", tmp_path / "venv", "requirements/demo.txt", PYTHON=str(bare))
    assert done.returncode == 1
    assert "pip could not install torch" in done.stderr
    assert "'pip download -r requirements/torch.txt -r requirements/demo.txt'" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr
    assert "PIP_FIND_LINKS=/path" in done.stderr


def test_old_python_is_refused_in_one_sentence(tmp_path):
    old = program(tmp_path / "python", 'if [ "$1" = -V ]; then echo Python 3.9.2; else exit 1; fi')
    done = run(SCRIPTS / "make_venv", tmp_path / "venv", "requirements/demo.txt", PYTHON=str(old))
    assert done.returncode == 1
    assert "is Python 3.9.2; Python 3.10 or newer is needed" in done.stderr
