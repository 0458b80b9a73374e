"""Which operators ran."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts moegemm's operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moegemm":
            self.counts[function._schema.name.removeprefix("moegemm::")] += 1
        return function(*args, **(kwargs or {}))
