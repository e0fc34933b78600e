"""One self-contained HTML page about results: no scripts, no network, inline SVG.

Read ``page``, then ``sections`` (the JSON of each command as text and pictures), ``charts``
(the pictures) and ``svg`` (axes and marks). May import ``reporting``, ``results``, ``units``
and ``errors``.
"""
