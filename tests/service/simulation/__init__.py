"""The service under a virtual clock, with faults of network, disk, clocks and processes, all from one seed."""
