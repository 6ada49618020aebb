"""The ops that bindings offer, by Horovod's names, and the exact sum."""

from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM
from ringreduce.training.options.options import Adasum, ReproducibleSum

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReproducibleSum", "Sum"]

Average = AVERAGE
Sum = SUM
Min = MIN
Max = MAX
Product = PRODUCT
