"""``batchfinder run``: launch an unmodified training script at one batch size after another.

Read ``template`` (the command with its placeholders), ``prober``, ``launch``, ``guardian``, then
``record``, ``epoch_end``, ``size_check``, ``verdict`` and ``conclusion``. ``hook`` runs inside the
script, and imports no batchfinder. May import the finder and everything below it.
"""
