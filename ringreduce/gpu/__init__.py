"""All that knows of devices: how their memory is found, staged, summed and sent."""
