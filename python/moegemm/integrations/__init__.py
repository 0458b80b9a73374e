"""Expert layers of models that others wrote, imported only by those who use them. See `moegemm.transformers`."""
