"""After a hang or a crash: reads each rank's record, and finds which rank stopped where. No torch here.

record.py            what one rank had issued, group by group
own_record.py        writes and reads the records of our own ranks
flight_recorder.py   reads dumps of PyTorch's flight recorder, of any torch job
record_folder.py     reads the records of all ranks
findings.py          compares the records: what happened

torch's own analyser (torch.distributed.flight_recorder) is not used: it unpickles whatever a file holds, fails on dumps
of Gloo, and ignores whether a collective had ended.
"""
