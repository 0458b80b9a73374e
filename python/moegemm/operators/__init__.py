"""Between Python and the compiled operators: loading them, what torch has to know of them, their options, the rules of
their arguments, and the way back of errors and warnings. Importing it loads and registers them."""

from moegemm.operators.process import early_loading
from moegemm.operators.registered import kernels_meta

kernels_meta.register()
early_loading.load_early()
