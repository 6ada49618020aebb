"""Python runs this at its start, in processes of tests: torch's optimizers do not import torch's compiler.

They call it in each step, to say what it must not compile, which matters where a program compiles its step. The import
takes a second in each rank of each job. All else of torch is as it is: `torch.compile` imports the compiler.
"""

import sys
from functools import wraps
from importlib.machinery import PathFinder


class Finder:
    """Loads torch.optim.optimizer with decorators that do without the compiler."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name == "torch.optim.optimizer" else None
        if spec:
            execute, spec.loader.exec_module = spec.loader.exec_module, lambda module: load(module, execute)
        return spec


def load(module, execute):
    """Execute the module."""
    import torch

    disable, torch._disable_dynamo = torch._disable_dynamo, lambda method: method
    execute(module)
    torch._disable_dynamo, module._use_grad_for_differentiable = disable, with_or_without_grad


def with_or_without_grad(step):
    """Decorate a step as torch does, but for two breaks in what is compiled."""
    import torch

    @wraps(step)
    def decorated(self, *args, **kwargs):
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return decorated


sys.meta_path.insert(0, Finder)
