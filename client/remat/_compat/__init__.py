"""Every private name of torch that the client uses: each part says what it offers, and tests itself.

A torch that lacks what a part imports is refused by a sentence. The parts `fake_cuda`, `gradients`, `inductor` and
`tags` are imported by what needs them, which is not the core of the client.
"""

from .versions import required

with required():
    from .autograd import *
    from .memory import *
    from .module_state import *
    from .operators import *
    from .symbols import *
    from .tracing import *
