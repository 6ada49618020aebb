"""What everything else stands on and nothing else knows: errors, settings, topology, arithmetic of blocks, checks of
arguments.
"""
