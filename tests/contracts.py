"""The checker of annotations: arrays and tensors alone, since bad input of other types is what many tests hand in."""

import functools
import inspect
from collections.abc import Callable, Iterable

import jaxtyping
from jaxtyping import AbstractArray, install_import_hook

wrapped = jaxtyping.jaxtyped


def check(packages: Iterable[str]) -> None:
    """Check every call in these packages, none of which is imported yet."""
    jaxtyping.jaxtyped = wrapped_if_needed  # the hook's code names it above each function and class
    install_import_hook(list(packages), f"{__name__}.{checked.__name__}")


def wrapped_if_needed(*, typechecker: Callable) -> Callable:
    """jaxtyping's decorator for what takes arrays. It would slow down every other function for nothing.

    Generators are left alone: decorators above, such as `torch.no_grad`, must see that they are.
    """
    left_alone = lambda made: inspect.isgeneratorfunction(made) or not takes_arrays(made)  # noqa: E731
    return lambda made: made if left_alone(made) else wrapped(made, typechecker=typechecker)


def takes_arrays(made: Callable) -> bool:
    """Whether an argument of a function, or of a class's `__init__`, is annotated as an array, or by a string."""
    hints = getattr(made.__init__ if inspect.isclass(made) else made, "__annotations__", {})
    return any(isinstance(hint, str) or _is_array(hint) for name, hint in hints.items() if name != "return")


def checked(function):
    """Raise `TypeError` for an argument that is an array, but not of the annotated type and shape."""
    signature = inspect.signature(function)
    arrays = {name: hint for name, hint in function.__annotations__.items() if _is_array(hint)}

    @functools.wraps(function)
    def call(*arguments, **named):
        given = signature.bind(*arguments, **named).arguments
        for name, hint in arrays.items():
            if name in given and hasattr(given[name], "shape") and not isinstance(given[name], hint):
                raise TypeError(f"{function.__qualname__}: {name} is {given[name]!r}; annotated as {hint}")
        return function(*arguments, **named)

    return call


def _is_array(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)
