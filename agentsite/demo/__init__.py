"""The demo: a small shop's support, with tools whose effects can be counted under `var/demo`."""
