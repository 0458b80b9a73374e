"""What cmake/instances.py makes of the lines of a list."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

GENERATOR = Path(sys.argv.pop(1))

LISTED = """\
// MOEGEMM_ROW_GEMM(.op = Op::kComment)
#define MOEGEMM_ROW_GEMM(...)
MOEGEMM_ROW_GEMM(.op = Op::kForward, .rows = 128,
                 .loads = Loads::kVectors)
MOEGEMM_ROW_GEMM(.arch = 100, .exact = true, .op = Op::kForward, .rows = 64)
MOEGEMM_WEIGHT_GEMM(.op = Op::kDw, .math = Math::kFloat)
"""
FORMATS = "using TensorCoreFormats = Formats<DType::kBFloat16, DType::kFloat16>;\n"


class Instances(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "sm80.inc").write_text(LISTED)
        (self.folder / "element.cuh").write_text(FORMATS)

    def units(self, *options):
        """Name, architecture and exactness of each unit."""
        files = [f"--list={self.folder}/sm80.inc", f"--formats={self.folder}/element.cuh"]
        command = [sys.executable, GENERATOR, *files, f"--folder={self.folder}/units", "--arch=80", *options]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return [(Path(path).name, arch, exact) for path, arch, exact in (line.rsplit(" ", 2) for line in lines)]

    def test_every_line_has_a_unit_for_each_element_type(self):
        names = [
            ("sm80_row_gemm_kForward_128_kVectors_kBFloat16.cu", "80", "FALSE"),
            ("sm80_row_gemm_kForward_128_kVectors_kFloat16.cu", "80", "FALSE"),
            ("sm80_row_gemm_100_exact_kForward_64_kBFloat16.cu", "100", "TRUE"),
            ("sm80_row_gemm_100_exact_kForward_64_kFloat16.cu", "100", "TRUE"),
            ("sm80_weight_gemm_kDw_kFloat_kFloat32.cu", "80", "FALSE"),
        ]
        self.assertEqual(self.units(), names)
        self.assertEqual([exact for _, _, exact in self.units("--exact")], ["TRUE"] * 5)

    def test_lines_that_agree_in_some_fields_are_one_unit(self):
        names = [name for name, _, _ in self.units("--together=op,math,arch")]
        together = ["sm80_row_gemm_kForward.cu", "sm80_row_gemm_kForward_100.cu", "sm80_weight_gemm_kDw_kFloat.cu"]
        self.assertEqual(names, together)
        text = (self.folder / "units" / names[0]).read_text()
        self.assertIn('#include "cuda/sm80/row_gemm/kernel.cuh"', text)
        self.assertIn("row_gemm_functions<RowGemm{.op = Op::kForward, .rows = 128, .loads = Loads::kVectors}", text)
        self.assertEqual(text.count("template KernelFunctions"), 2)

    def test_what_would_not_change_is_not_written(self):
        path = self.folder / "units" / self.units()[0][0]
        before = path.stat().st_mtime_ns
        self.units()
        self.assertEqual(path.stat().st_mtime_ns, before)


if __name__ == "__main__":
    unittest.main()
