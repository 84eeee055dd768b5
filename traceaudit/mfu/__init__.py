"""Numerator and denominator of MFU, and where compute time stands on the roofline."""
