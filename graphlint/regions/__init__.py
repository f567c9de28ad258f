"""Where a program captures: every region of a project, in every spelling.

anchors   which texts can hold a region at all
outline   one file, indexed: scopes, bindings, calls with their place
names     what an expression is called; constants: which literals it may be
apis      the known capturing APIs
contexts  captures that are entered (`with`, ExitStack); bodies: what runs between a begin and its end
compiled  torch.compile with graphs
search    the regions of one file
facts, derive   what the project itself defines that captures
project   all files, until nothing new is learnt
"""

from graphlint.regions.anchors import anchored
from graphlint.regions.project import Search, find, find_all
from graphlint.regions.region import KINDS, Region

__all__ = ["KINDS", "Region", "Search", "anchored", "find", "find_all"]
