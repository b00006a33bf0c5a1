"""The checker of annotations: arrays and tensors alone, since bad input of other types is what many tests hand in."""

import functools
import inspect

from jaxtyping import AbstractArray


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
