"""Engines that solve programs, each in a child process that can be killed: HiGHS and CBC."""
