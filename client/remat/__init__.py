"""Train inside a memory budget: capture a torch model's training step, have it planned, run it by the plan."""

# The public names are listed in the stub next to this file, once: type checkers read them there, and each is loaded
# when it is first asked for, so that `import remat` needs no torch and stays quick.
import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
