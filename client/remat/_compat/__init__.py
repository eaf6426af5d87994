"""Every private name of torch that the client uses, in parts that test themselves.

A part offers what it defines without an underscore before the name, and what it imports as that same name; a type
checker lets nothing else through. A torch that lacks what a part imports is refused by a sentence. The parts
`fake_cuda`, `gradients`, `inductor` and `tags` are imported by what needs them, which is not the core of the client.
"""

from .versions import required

with required():
    from .autograd import *
    from .memory import *
    from .module_state import *
    from .operators import *
    from .symbols import *
    from .tracing import *
