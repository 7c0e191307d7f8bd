"""An executable memory model of Hopper's asynchronous machine: emitted Gluon kernels, run on a CPU.

README.md says what is modelled, and by which rules.
"""

from tilegen.memory_model.faults import Fault
from tilegen.memory_model.run import Report, run

__all__ = ["Fault", "Report", "run"]
