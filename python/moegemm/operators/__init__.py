"""Between Python and the compiled operators: loading them, what torch has to know of them, their flags, the rules of
their arguments, and the way back of errors and warnings."""
