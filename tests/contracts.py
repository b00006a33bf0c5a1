"""The checker of annotations: arrays and tensors alone, since bad input of other types is what many tests hand in."""

import functools
import inspect
from collections.abc import Callable, Iterable

import jaxtyping
from jaxtyping import AbstractArray, install_import_hook

wrapped = jaxtyping.jaxtyped
DIMENSIONS = jaxtyping.jaxtyped("context")  # in which one name of a dimension stands for one size


def check(packages: Iterable[str]) -> None:
    """Check every call in these packages, none of which is imported yet."""
    jaxtyping.jaxtyped = wrapped_if_needed  # the hook's code names it above each function and class
    install_import_hook(list(packages), f"{__name__}.{checked.__name__}")


def wrapped_if_needed(*, typechecker: Callable) -> Callable:
    """jaxtyping's decorator for what takes arrays. It would slow down every other function for nothing.

    Generators are left alone: decorators above, such as `torch.no_grad`, must see that they are. jaxtyping checks the
    arguments of a function twice, once more for the sake of its result, so functions whose annotations can be read at
    once get the checker itself.
    """

    def wrap(made: Callable) -> Callable:
        if inspect.isgeneratorfunction(made) or not takes_arrays(made):
            return made
        if inspect.isfunction(made) and not any(isinstance(hint, str) for hint in made.__annotations__.values()):
            return typechecker(made)
        return wrapped(made, typechecker=typechecker)

    return wrap


def takes_arrays(made: Callable) -> bool:
    """Whether an argument of a function, or of a class's `__init__`, is annotated as an array, or by a string."""
    hints = getattr(made.__init__ if inspect.isclass(made) else made, "__annotations__", {})
    return any(isinstance(hint, str) or _is_array(hint) for name, hint in hints.items() if name != "return")


def checked(function):
    """Raise `TypeError` for an argument that is an array, but not of the annotated type and shape."""
    parameters = [*inspect.signature(function).parameters.values()]
    last = sum(of.kind != of.KEYWORD_ONLY for of in parameters)  # the others have no place among the arguments
    arrays = [(place, of.name, of.annotation) for place, of in enumerate(parameters) if _is_array(of.annotation)]

    @functools.wraps(function)
    def call(*arguments, **named):
        with DIMENSIONS:
            for place, name, hint in arrays:
                given = named.get(name) if place >= min(last, len(arguments)) else arguments[place]
                if hasattr(given, "shape") and not isinstance(given, hint):
                    raise TypeError(f"{function.__qualname__}: {name} is {given!r}; annotated as {hint}")
        return function(*arguments, **named)

    return call


def _is_array(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)
