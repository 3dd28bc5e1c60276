"""Models to test and measure with, made on the spot: nothing is downloaded.

`fodit.testing.tiny` writes complete pipeline folders of about 1 MB for tests and demos;
`fodit.testing.dummy` builds the published architectures at full size with random weights for measurements.
"""
