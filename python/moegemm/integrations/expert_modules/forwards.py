"""Gives one module another forward without touching its class, its name or what others have wrapped around it.

The module's class becomes a subclass with the new forward. So hooks, FSDP and adapters find a forward where they look
for it, `super().forward` is the module's own code, and a pickle names the two classes that it is made from.
"""

import copyreg
import functools
import types
from typing import Any

from torch.nn.utils import parametrize


class Changed:
    """What the classes given to modules have in common. Before them in the order of classes, after them the module's
    own."""

    _moegemm_own_class: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        made_by_others = "_moegemm_own_class" not in vars(type(self))
        if made_by_others or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        _, arguments, *rest = reduced
        return (_made_again, (type(self).__bases__[0], self._moegemm_own_class, *arguments[1:]), *rest)


class OnMoegemm(Changed):
    """One whose forward runs on moegemm."""


@functools.cache
def class_with(forward_class: Any, own_class: Any) -> Any:
    """The subclass of a module's class that has the forward of `forward_class`, under the same name."""
    names = {
        "_moegemm_own_class": own_class,
        "__module__": own_class.__module__,
        "__qualname__": own_class.__qualname__,
        "__doc__": own_class.__doc__,
    }
    return type(own_class.__name__, (forward_class, own_class), names)


def _made_again(forward_class: Any, own_class: Any, *arguments: Any) -> Any:
    made = class_with(forward_class, own_class)
    return made.__new__(made, *arguments)


def _bound_forwards(module: Any) -> list[str]:
    """Where a module keeps its forward besides its class: accelerate's hooks call `_old_forward`, and leave it as
    `forward` when they are taken away."""
    kept = {name: vars(module).get(name) for name in ("_old_forward", "forward")}
    return [name for name, at in kept.items() if isinstance(at, types.MethodType) and at.__self__ is module]


def why_not_replaceable(module: Any) -> str | None:
    """Why this module cannot get another forward now, or None."""
    if parametrize.is_parametrized(module):
        return "its weights are parametrized, which changes its class; patch it before"
    if "forward" in vars(module) and not _bound_forwards(module):
        forward = vars(module)["forward"]
        replaced = getattr(forward, "__qualname__", type(forward).__name__)
        return (
            f"its forward was replaced by {replaced}, which cannot be told to call another one; patch before that is "
            'done, or load the model with experts_implementation="moegemm"'
        )
    return None


def _become(module: Any, other_class: Any) -> None:
    module.__class__ = other_class
    for name in _bound_forwards(module):
        setattr(module, name, types.MethodType(other_class.forward, module))


def give_forward(module: Any, forward_class: Any) -> None:
    """From now on the module runs the methods of `forward_class`, a class derived from Changed."""
    own_class: Any = type(module)
    _become(module, class_with(forward_class, own_class))


def take_forward_back(module: Any) -> None:
    """Undoes give_forward."""
    if "_moegemm_own_class" not in vars(type(module)):
        raise ValueError(
            f"{type(module).__name__} was wrapped after it was patched, which made a class on top of ours; take the "
            "wrapper away before unpatch"
        )
    _become(module, type(module)._moegemm_own_class)
