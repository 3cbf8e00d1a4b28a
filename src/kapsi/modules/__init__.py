"""Head → Layer → Model, and the stores with their tensors: the only stateful part.

y = contract(self.expand(x), self.weights()).sum(channels) + self.remainder(x)
"""

from kapsi.modules.head import *
from kapsi.modules.layer import *
from kapsi.modules.model import *
from kapsi.modules.store import *
