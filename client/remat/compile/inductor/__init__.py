"""Plans under Inductor's kernels: ops are fusion regions, and a plan is replanned until the generated code fits."""
