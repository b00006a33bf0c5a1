"""Annotations of tensors are contracts: under the tests they are checked at every call."""

from jaxtyping import install_import_hook

from tests import contracts

# not `formats` and `storage`: they check at run time, and compiled functions take no checker
CHECKED = ("evaluation", "models", "pruning", "quantization", "shapes", "simulation", "text")

install_import_hook([f"toolkit.{name}" for name in CHECKED], f"{contracts.__name__}.checked")
