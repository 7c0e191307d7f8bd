"""An executable memory model of Hopper's asynchronous machine: emitted Gluon kernels, run on a CPU.

README.md says what is modelled, and by which rules.
"""

from tests.gluon.memory_model.faults import Fault
from tests.gluon.memory_model.run import Report, run

__all__ = ["Fault", "Report", "run"]
