"""After a hang or a crash: what each rank's records say, and which rank stopped where. No torch in it.

record.py            what one rank had issued, group by group
flight_recorder.py   such a record from a dump of PyTorch's flight recorder, of any torch job
own_record.py        such a record as our own ranks leave it
record_folder.py     the records of all ranks
findings.py          those records -> what happened
"""
