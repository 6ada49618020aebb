"""Named asynchronous operations: negotiated by name, fused, run in one order on all ranks."""

from ringreduce.engine.engine import Engine as Engine
from ringreduce.engine.engine import ReentrancyGuard as ReentrancyGuard
from ringreduce.engine.fused import AS_THEY_ARE as AS_THEY_ARE
from ringreduce.engine.fused import Travel as Travel
from ringreduce.engine.operations import About as About
from ringreduce.engine.operations import CollectiveOp as CollectiveOp
from ringreduce.engine.operations import Context as Context
from ringreduce.engine.operations import Gather as Gather
from ringreduce.engine.operations import InPlaceAllreduce as InPlaceAllreduce
from ringreduce.engine.operations import Needed as Needed
from ringreduce.engine.operations import Operation as Operation
from ringreduce.engine.operations import Reduction as Reduction
from ringreduce.engine.operations import Refusal as Refusal
from ringreduce.engine.operations import unnamed as unnamed
