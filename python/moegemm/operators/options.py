"""The words of the operators' `options` argument. The operators refuse any other.

A text of words is built with +, asked with `in` and has one taken out by `without`: each begins with a space, and none
is a part of another.
"""

from typing import Final

PERMUTE_X: Final = " permute_x"
PERMUTE_Y: Final = " permute_y"
MULTIPLY: Final = " multiply"
ALLOW_TF32: Final = " allow_tf32"
CHECK: Final = " check"
ACCUMULATE: Final = " accumulate"
FLOAT32_OUTPUT: Final = " float32_output"
WARN_AT_ONCE: Final = " warn_at_once"
DY_PER_TOKEN: Final = " dy_per_token"
AUTOTUNE: Final = " autotune"
ROWS_PENDING: Final = " rows_pending"  # the launch ahead writes X and nothing else that the product reads
TRANSPOSED: Final = " transposed"
TAILS_UNDEFINED: Final = " tails_undefined"
EXPECTED_ROWS: Final = " expected_rows="  # and a number


def without(options: str, word: str) -> str:
    return options.replace(word, "")
