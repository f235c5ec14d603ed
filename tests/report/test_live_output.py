"""Output that does not wait for its reader."""

from __future__ import annotations

import os
import threading

from launcher.report.live import Output


def test_a_stalled_reader_holds_nothing_and_loses_only_what_is_too_much() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        output = Output(writer, trim=True)
        output.write("first  \n")
        output.flush()
        output.unblock()
        for number in range(400):
            output.write(f"{number:<9999}.\n")  # 4 MB: more than the pipe and the buffer hold
        assert not output.finish(patient=False)
        text: list[str] = []
        thread = threading.Thread(target=lambda: text.extend(reader))
        thread.start()
        assert output.finish(patient=True)
        output.write("direct\n")
        writer.close()
        thread.join()
    assert [line[:2] for line in text[:3]] == ["fi", "0 ", "1 "], "in their order"
    assert len(text) > 100
    assert text[-2].endswith("lines are left out: the reader was too slow ---\n")
    assert text[-1] == "direct\n"


def test_a_reader_that_is_gone_is_an_error_as_ever() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as writer:
        output = Output(writer)
        output.unblock()
        output.write("nobody reads this\n")
        assert output.finish(patient=True)
        try:
            output.write("nor this\n")
            output.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
        else:
            raise AssertionError("no error")
