"""Every private name of Inductor that the client uses, behind a self-test of its own; imported only when asked for."""

from .code import *
from .compiling import *
