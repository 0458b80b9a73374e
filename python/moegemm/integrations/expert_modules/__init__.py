"""One experts module of a model: what it computes, where its weights are, and its forward on moegemm."""
