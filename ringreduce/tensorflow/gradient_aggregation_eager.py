"""What Horovod's programs import from ``horovod.tensorflow.gradient_aggregation_eager``: one class does both here."""

from ringreduce.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper as LocalGradientAggregationHelperEager,
)

__all__ = ["LocalGradientAggregationHelperEager"]
