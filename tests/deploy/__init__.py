"""The files of deploy/: configurations of proxies, units, containers."""
