"""Makes the files of a release: wheels with prebuilt kernels (`make wheels`)."""
