"""What Horovod's programs import from ``horovod.tensorflow.util``."""

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly
