import os
import threading

import pytest
import torch

from rollart.backends.torch.threads import available, claim, shares


def test_the_shares_are_disjoint_where_there_are_two_cores_and_cover_all():
    engines, learner = shares()
    assert sorted({*engines, *learner}) == available()
    assert not set(engines) & set(learner) or len(available()) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be pinned here")
def test_a_claim_binds_the_claiming_thread_only():
    seen = {}

    def work():
        claim(0, available()[:1])
        seen.update(cores=os.sched_getaffinity(0), threads=torch.get_num_threads())

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == {"cores": {available()[0]}, "threads": 1}
    assert os.sched_getaffinity(0) == before
