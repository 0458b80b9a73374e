"""Expert layers of models that others wrote. Imported only by those who use them; `moegemm.transformers` is the way in."""
