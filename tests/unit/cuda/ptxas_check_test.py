"""What cmake/ptxas_check.py lets through and what it refuses, with a script in nvcc's place."""

import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

CHECKER = Path(sys.argv.pop(1))

GOOD = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6kernelPf' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
"""
SPILLS = GOOD.replace("0 bytes spill loads", "4 bytes spill loads")
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions defining accumulator registers\n" + GOOD
)
IGNORED = "ptxas warning : (C7508) setmaxnreg ignored to maintain minimum register count\n" + GOOD


class PtxasCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.target = self.folder / "kernel.cu.o"

    def compile(self, messages, status=0, verbose=True):
        compiler = self.folder / "compiler.py"
        compiler.write_text(
            textwrap.dedent(f"""\
            import sys
            open(sys.argv[sys.argv.index("-o") + 1], "w").close()
            sys.stderr.write({messages!r})
            sys.exit({status})
            """)
        )
        flags = ["-Xptxas=-v"] if verbose else []
        return subprocess.run(
            [
                *[sys.executable, CHECKER, f"--summary={self.folder}/report.txt", "--"],
                *[sys.executable, compiler, *flags, "-c", "kernel.cu", "-o", self.target],
            ],
            capture_output=True,
            check=False,
            text=True,
        )

    def test_a_good_kernel_is_quiet_and_in_the_summary(self):
        result = self.compile(GOOD)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertTrue(self.target.exists())
        summary = (self.folder / "report.txt").read_text()
        self.assertIn("kernel.cu  kernel(float*)", summary)
        self.assertRegex(summary, r"168 +1024 +0 +sm_90a")

    def test_spills_fail_and_leave_no_object(self):
        result = self.compile(SPILLS)
        self.assertEqual(result.returncode, 1)
        self.assertIn("4 bytes spill loads", result.stderr)
        self.assertFalse(self.target.exists())

    def test_serialised_wgmma_fails(self):
        self.assertEqual(self.compile(SERIALISED).returncode, 1)

    def test_ignored_setmaxnreg_fails(self):
        self.assertEqual(self.compile(IGNORED).returncode, 1)

    def test_warnings_of_a_good_compilation_are_shown(self):
        result = self.compile("kernel.cu(3): warning #177-D: unused\n" + GOOD)
        self.assertEqual(result.returncode, 0)
        self.assertIn("unused", result.stderr)

    def test_a_failed_compilation_keeps_its_status_and_messages(self):
        result = self.compile("kernel.cu(3): error: expected a ;\n", status=2)
        self.assertEqual(result.returncode, 2)
        self.assertIn("expected a ;", result.stderr)

    def test_a_compilation_without_ptxas_output_passes(self):
        self.assertEqual(self.compile("", verbose=False).returncode, 0)


if __name__ == "__main__":
    unittest.main()
