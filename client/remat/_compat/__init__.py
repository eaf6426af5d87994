"""Every private name of torch that the client uses: each part says what it offers, and tests itself.

A torch that lacks what a part imports is refused by a sentence. The parts for plans by tags and under Inductor,
`_compat.tags` and `_compat.inductor`, are imported by those alone.
"""

from .versions import required

with required():
    from .autograd import *
    from .fake_cuda import *
    from .memory import *
    from .module_state import *
    from .operators import *
    from .symbols import *
    from .tracing import *
