"""How samples lie in files (DPP paper, section 4.2): features in columns of their own, in order of use, read in few
large reads.
"""
