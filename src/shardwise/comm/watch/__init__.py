"""The watchdog: it names the rank that holds up the others, and ends the job.

watch.py           waits, and asks the others by noticeboard.py; pace.py: how long, stall.py: which rank it was
barrier.py         whether this process waits in a barrier of other code
record_writer.py   writes the record that `shardwise autopsy` reads
"""
