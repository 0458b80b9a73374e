"""Which operators ran."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Notes moegemm's operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.names)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moegemm":
            self.names.append(function._schema.name.removeprefix("moegemm::"))
        return function(*args, **(kwargs or {}))
