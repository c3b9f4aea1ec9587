"""Short stories from a grammar of our own: every text keeps its hero, pronouns, place, thing and problem straight from the
first sentence to the last, which sampled text of a small teacher does not always do.

A plot is a list of steps, a step a list of alternatives ("" may stand for leaving the step out). `stories(seed)` yields
texts without end.
"""
import random

BOYS = """Tom Ben Max Sam Jack Leo Tim Oscar Finn Hugo Peter Luke Adam Henry Will Omar Kofi Ravi Chen Diego Ali Pablo Noah Felix Ned
Theo George Harry Bob Dan Joe Nick""".split()
GIRLS = """Lily Anna Mia Lucy Emma Ruby Sara Nora Ella Clara Rosa Ivy Alice Maya Zoe Aisha Amara Priya Mei Sofia Hana Leila Ines Eva
Greta Molly Daisy Kate Jane Mary Sue Amy Beth Rose""".split()
CREATURES = """cat dog fox rabbit bear mouse owl duck frog squirrel hen lamb pony puppy kitten bird turtle hedgehog deer pig goat
monkey penguin robin otter beaver""".split()
CHILDREN = {"he": "boy", "she": "girl"}
GROWN = {"he": "farmer baker king fisherman gardener carpenter painter tailor cook postman shepherd sailor teacher".split(),
         "she": "farmer baker queen fisherwoman gardener painter tailor cook teacher shepherd doctor singer".split()}
TRAIT = "little brave kind shy curious clever happy young tiny quiet gentle careful friendly cheerful patient playful small".split()
HOME = {"creature": ["in a green forest", "near a quiet lake", "on a small farm", "under an old oak tree", "by the river", "in a big garden",
                     "at the edge of the woods", "on a sunny hill", "in a warm barn", "in a meadow full of flowers"],
        "person": ["in a small village", "in a little house by the sea", "in a town near the mountains", "at the end of a long street", "on a small farm",
                   "in a house with a blue door", "near the old bridge", "in a big city", "next to the market", "on a small island"]}
THING = """red ball|golden key|blue kite|little boat|wooden box|blue hat|shiny stone|warm coat|silver ring|little bell|green umbrella|small drum|
toy train|picture book|red scarf|new pencil|white shell|soft blanket|old map|yellow bucket|little wagon|pair of boots""".replace("\n", "").split("|")
SPOT = """under the bed|behind the door|under a bush|behind the old tree|in the tall grass|next to the well|under the bridge|in the kitchen|
on the roof|behind a big rock|under the table|in the barn|near the pond|at the bottom of the garden""".replace("\n", "").split("|")
FOOD = "an apple|a piece of bread|some soup|a big cake|a bowl of berries|some cheese|a jar of honey|a warm pie|some cookies|a basket of plums".split("|")
FLOWER = "a sunflower|a rose|a small apple tree|some carrots|a row of beans|a pumpkin|some tulips|a strawberry plant".split("|")
WHEN = "One day,|One morning,|One sunny morning,|One afternoon,|One evening,|One cold day,|One spring day,|On a quiet Sunday,|The next day,|Early one morning,".split("|")
END = """{N} smiled and went to sleep.|It was a very good day.|From that day on, {N} and {F} were best friends.|{N} was very happy.|They laughed and walked home together.|
{N} never forgot that day.|And they all lived happily ever after.|Then {he} went home, tired and happy.|"What a day!" said {N}.|
That night, {N} slept very well.|{N} felt warm inside.|"I am so lucky to have you," said {N}.|And so {N} and {F} sat in the sun and ate {food}.|
Everyone was happy.|{F} gave {N} a big hug.|""".replace("\n", "").split("|")
LIKES = """{He} liked to {like}.|{N} loved to {like}.|Every day, {he} went out to {like}.|More than anything, {N} liked to {like}.|{He} was always kind to others.|
Everyone there liked {him}.|{His} best friend was a {fkind} named {F}.|{N} had a good friend, a {fkind} named {F}.|""".replace("\n", "").split("|")
LIKE = """sing|run in the grass|look at the stars|read books|play in the rain|swim in the lake|climb trees|dance|bake bread|listen to stories|paint pictures|
walk by the river|look at the clouds|pick flowers|jump in the leaves|play with friends|help others""".replace("\n", "").split("|")
OPEN = ["Once upon a time, there was a {trait} {kind} named {N}. {N} lived {home}.",
        "Once upon a time, a {trait} {kind} named {N} lived {home}.",
        "There once was a {trait} {kind} who lived {home}. {His} name was {N}.",
        "{N} was a {trait} {kind}. {He} lived {home}.",
        "{N} the {kind} lived {home}.",
        "A {trait} {kind} named {N} lived {home}.",
        "In a place far away, there lived a {trait} {kind}. {His} name was {N}.",
        "Long ago, there was a {trait} {kind} who lived {home}. Everyone called {him} {N}.",
        "This is the story of {N}, a {trait} {kind} who lived {home}.",
        "{N} was {a_trait} {kind} who lived {home}."]

PLOTS = {
    "lost thing": [
        ["{N} had a {thing}. It was {his} favorite thing in the world.", "{N} had a {thing} that {he} loved very much.", "{His} mother had given {him} a {thing}.", "For {his} birthday, {N} got a {thing}."],
        ["{when} the {thing} was gone.", "{when} {N} could not find the {thing}.", "{when} {N} looked for the {thing}, but it was not there."],
        ["\"Where is my {thing}?\" {he} cried.", "{N} was very sad.", "{N} began to cry.", "\"Oh no!\" said {N}. \"I have lost my {thing}!\"", "\"I must find it,\" said {N}."],
        ["{He} looked {spot}, but it was not there. {He} looked {spot2}, but it was not there either.", "{He} looked {spot}. {He} looked {spot2}. It was nowhere.", "{N} looked everywhere. {He} looked {spot} and {spot2}."],
        ["Then {F} the {fkind} came by. \"Why are you so sad?\" asked {F}.", "{His} friend {F} saw {him}. \"What is wrong?\" asked {F}.", "A {fkind} named {F} heard {him}. \"Can I help you?\" {fhe} asked."],
        ["\"I lost my {thing},\" said {N}. \"I will help you,\" said {F}.", "{N} told {F} about the {thing}. \"Let us look together,\" said {F}.", "\"I cannot find my {thing},\" said {N}. \"Do not worry,\" said {F}. \"Two can look better than one.\""],
        ["They looked and looked. At last, {F} found the {thing} {spot3}.", "Together they looked {spot3}, and there it was!", "\"Look!\" said {F}. \"It is {spot3}!\" And there was the {thing}.", "Soon they saw something {spot3}. It was the {thing}!"],
        ["\"Thank you!\" said {N}. \"You are a good friend.\"", "{N} was so happy that {he} danced.", "{N} hugged {F} and said, \"Thank you so much.\"", "\"You found it!\" said {N} with a big smile."]],
    "found thing": [
        ["{when} {N} found a {thing} {spot}.", "{when} {N} went for a walk and saw a {thing} {spot}.", "{when} {he} saw something {spot}. It was a {thing}."],
        ["\"Whose is this?\" {he} asked.", "\"What a nice {thing}!\" said {N}.", "It was very beautiful.", "{N} picked it up and looked at it.", "{He} wanted to keep it."],
        ["But then {he} thought, \"Someone has lost this. Someone must be sad.\"", "But {N} knew that it was not {his}.", "\"It is not mine,\" {he} said. \"I must find out whose it is.\""],
        ["{He} went to the {p1} and asked, \"Is this your {thing}?\" \"No,\" said the {p1}, \"it is not mine.\"", "{N} asked the {p1}, but the {p1} shook {p1his} head.", "First {he} asked the {p1}. \"I have never seen it,\" said the {p1}."],
        ["Then {he} met a {fkind} named {F}. {F} was crying.", "Then {he} saw {F} the {fkind}, who looked very sad.", "At last {he} came to the house of {F} the {fkind}."],
        ["\"I have lost my {thing},\" said {F}. \"Is it this one?\" asked {N}.", "\"Is this yours?\" asked {N}, and {he} showed {fhim} the {thing}.", "{N} held out the {thing}. \"Is it yours?\" {he} asked."],
        ["\"Yes! Thank you!\" said {F}. \"You are very honest.\"", "{F} jumped with joy. \"You found it! Thank you!\"", "\"That is my {thing}!\" said {F}. \"How can I thank you?\""],
        ["{F} gave {N} {food}, and they ate it together.", "They became good friends.", "{F} asked {N} to stay and play.", "After that, they played together every day."]],
    "garden": [
        ["{when} {N} got some seeds.", "{when} {F} the {fkind} gave {N} a small seed.", "{when} {N} wanted to grow {flower}."],
        ["{He} made a hole in the soft ground and put the seed in it.", "{He} planted it in the garden.", "{N} put it in the ground and covered it with earth."],
        ["Every day, {N} gave it water.", "{He} watered it every morning.", "The sun was warm, and {N} gave it water every day."],
        ["But nothing happened. {N} was sad.", "{He} waited and waited, but nothing came up.", "\"Why does it not grow?\" asked {N}.", "After a week, there was still nothing to see."],
        ["\"You must be patient,\" said {F}. \"Good things take time.\"", "\"Wait a little longer,\" said {F} the {fkind}.", "{F} said, \"Plants need water, sun and time.\""],
        ["So {N} waited. Then it rained, and the sun came out.", "So {N} went on giving it water, day after day.", "{N} did not give up."],
        ["One morning, there was a little green leaf.", "Then, one day, {he} saw something green.", "At last, a small green plant came out of the ground."],
        ["\"It is growing!\" shouted {N}.", "{N} was so happy that {he} called everyone to look.", "\"Look, {F}! Look!\" said {N}."],
        ["The plant grew and grew. In the summer, {N} had {flower}.", "Soon it was taller than {N}.", "By the end of the summer, it was big and strong."],
        ["{N} learned that it is good to be patient.", "{N} gave some of it to all {his} friends.", "\"You were right,\" {he} said to {F}. \"Good things take time.\""]],
    "afraid": [
        ["But {N} was afraid of {fear}.", "There was one thing that {N} did not like: {he} was afraid of {fear}.", "{N} had a secret. {He} was afraid of {fear}."],
        ["When {his} friends {went}, {N} stayed at home.", "Every time, {he} closed {his} eyes and hid {spot}.", "{He} did not want anyone to know."],
        ["{when} {F} the {fkind} asked, \"Why do you hide?\"", "{when} {his} friend {F} came to see {him}.", "{when} {F} the {fkind} found {him} {spot}."],
        ["\"I am afraid,\" said {N} in a small voice.", "{N} told {F} the truth. \"I am afraid of {fear},\" {he} said.", "\"I am not brave,\" said {N}."],
        ["\"Everyone is afraid of something,\" said {F}. \"I will stay with you.\"", "\"I was afraid too,\" said {F}. \"Take my hand, and we will try together.\"", "{F} did not laugh. \"Let us try it step by step,\" {fhe} said."],
        ["So they went together. {N} took one small step, and then another.", "{N} took a deep breath. {F} stayed close to {him}.", "They held hands and counted to three."],
        ["It was not so bad after all.", "After a while, {N} opened {his} eyes. Nothing bad had happened.", "\"I am doing it!\" said {N}.", "Slowly, {N} was not afraid anymore."],
        ["\"You see?\" said {F}. \"You are very brave.\"", "\"Thank you for your help,\" said {N}.", "{N} was proud.", "Now {N} knew that being brave means to try even when you are afraid."]],
    "share": [
        ["{when} {N} had {food}.", "{when} {N} made {food}.", "{when} {his} mother gave {him} {food}."],
        ["It smelled very good. {N} wanted to eat it all.", "{He} was very hungry.", "\"This is all for me,\" {he} said.", "{N} sat down {home2} to eat it."],
        ["Then {F} the {fkind} came along. {F} looked thin and tired.", "Then {he} saw {F} the {fkind}, who had nothing to eat.", "A {fkind} named {F} sat down next to {him}."],
        ["\"I have not eaten all day,\" said {F}.", "\"I am so hungry,\" said {F}.", "{F} looked at the food but said nothing."],
        ["{N} thought for a moment. There was not very much.", "{N} looked at the food, and then {he} looked at {F}.", "At first, {N} did not want to share."],
        ["Then {he} cut it in two and gave {F} one half.", "\"Here,\" said {N}. \"We can share it.\"", "But {he} had a kind heart. \"Please, eat with me,\" said {N}."],
        ["They ate together and told each other stories.", "{F} ate and smiled. \"Thank you,\" {fhe} said. \"You are very kind.\"", "It tasted even better than before."],
        ["The next day, {F} came back with {food2} for {N}.", "A week later, {N} was hungry, and it was {F} who shared {food2} with {him}.", "After that day, they always shared their food."],
        ["{N} learned that sharing makes everyone happy.", "\"A friend is better than a full plate,\" said {N}.", ""]],
    "storm": [
        ["{when} dark clouds came over the hills.", "{when} the wind began to blow.", "{when} the sky turned gray, and it started to rain."],
        ["It rained and rained. The wind was very strong.", "There was thunder, and the rain fell hard.", "Soon there was a big storm."],
        ["{N} ran home as fast as {he} could.", "{N} closed the door and the windows.", "{N} was safe and warm inside."],
        ["Then {he} heard a small voice. \"Help! Help!\"", "Then someone knocked at the door.", "Suddenly {he} heard someone cry outside."],
        ["It was {F} the {fkind}. {F} was wet and cold.", "{N} looked out and saw {F} the {fkind}, who was very wet.", "Outside stood a {fkind} named {F}. \"My house is gone,\" {fhe} said."],
        ["\"Come in, come in!\" said {N}. {He} gave {F} a warm blanket.", "{N} let {fhim} in and made a fire.", "\"You can stay here tonight,\" said {N}."],
        ["They ate {food} and listened to the rain.", "{N} gave {F} {food}, and soon {F} felt better.", "They sat by the fire and told stories all night."],
        ["In the morning, the sun was shining again.", "The next morning, the storm was over, and there was a rainbow in the sky.", "When they woke up, the sky was blue."],
        ["{N} helped {F} to build a new house.", "\"Now we will mend your house,\" said {N}, and they worked all day.", "All the neighbors came to help, and soon everything was as good as new."],
        ["\"You are a true friend,\" said {F}.", "\"Thank you for opening your door,\" said {F}.", ""]],
    "lost way": [
        ["{when} {N} went for a walk in the forest.", "{when} {N} followed a butterfly into the woods.", "{when} {he} walked and walked and did not look at the path."],
        ["After a while, {he} did not know where {he} was.", "Soon everything looked the same. {N} was lost.", "When {he} wanted to go home, {he} could not find the way."],
        ["It was getting dark. {N} was afraid.", "The sun went down, and the moon came up.", "{N} sat down under a tree and cried."],
        ["\"I want to go home,\" {he} said.", "\"Is anyone there?\" called {N}.", "\"What should I do?\" {he} asked."],
        ["A {fkind} came out of the trees. \"My name is {F},\" {fhe} said. \"Are you lost?\"", "Then {he} met {F} the {fkind}. \"Where do you live?\" asked {F}.", "{F} the {fkind} heard {him} and came to help."],
        ["\"I am lost,\" said {N}. \"I live {home}.\" \"I know that place,\" said {F}. \"Come with me.\"", "\"I live {home},\" said {N}. \"Then follow me,\" said {F}. \"I know the way.\""],
        ["They walked over a bridge and around a lake.", "They went down the hill and across the river.", "{F} showed {him} the stars, and they followed the brightest one."],
        ["At last, {N} saw the lights of {his} home.", "Soon {N} saw {his} house.", "\"There it is!\" shouted {N}. \"That is my home!\""],
        ["{His} mother ran out and hugged {him}. \"I was so worried!\" she said.", "{His} family was so happy to see {him}.", "\"Thank you, {F},\" said {N}. \"Please come and eat with us.\""],
        ["After that, {N} always looked at the path.", "From then on, {N} never walked too far alone.", ""]],
    "race": [
        ["{when} there was a big race.", "{when} all the animals talked about the race.", "{when} {F} the {fkind} said, \"I can run faster than you!\""],
        ["{N} wanted to win, but {he} was not very fast.", "\"You are too slow,\" said the others. \"You will never win.\"", "{N} had never been in a race before."],
        ["So every morning, {he} got up early and ran up the hill.", "{N} practiced every day.", "\"I will try my best,\" said {N}."],
        ["On the day of the race, everyone came to see it.", "Then the day came. The sun was shining.", "\"One, two, three, go!\" said the old owl."],
        ["{F} ran very fast, and {N} was last.", "{F} was in front. {N} ran behind {fhim}.", "They ran past the barn and over the bridge."],
        ["But then {F} fell and hurt {fhis} leg.", "Suddenly, {F} fell down and could not get up.", "Near the river, {F} fell over a stone."],
        ["{N} could have won, but {he} stopped. \"Are you hurt?\" {he} asked.", "{N} stopped and turned around. \"I will help you,\" {he} said."],
        ["{N} helped {F} up, and they walked to the end together.", "\"Lean on me,\" said {N}, and they went on side by side."],
        ["Everyone clapped and cheered.", "They did not win, but everyone cheered for them.", "\"That was better than winning,\" said the owl."],
        ["\"You are the real winner,\" said {F}.", "{N} learned that a good friend is better than a prize.", ""]],
    "present": [
        ["It was almost {F}'s birthday. {F} was {N}'s best friend.", "{when} {N} heard that {F} the {fkind} had a birthday.", "Tomorrow was the birthday of {F} the {fkind}."],
        ["{N} wanted to give {fhim} something nice, but {he} had no money.", "\"What can I give {fhim}?\" asked {N}.", "{N} thought and thought. What would {F} like?"],
        ["{He} went to the market, but everything cost too much.", "{He} asked the {p1}. \"Make something with your own hands,\" said the {p1}.", "\"I could make something,\" {he} thought."],
        ["So {N} took some wood and made a small {toy}.", "So {he} sat down and painted a picture of {F}.", "So {N} picked flowers in the meadow and tied them with a ribbon.", "So {N} baked a little cake with honey and nuts."],
        ["It took all day, and {he} worked until it was dark.", "{He} worked very carefully.", "It was not easy, but {he} did not give up."],
        ["The next day, {N} gave it to {F}. \"Happy birthday!\" {he} said.", "At the party, {N} was shy. \"It is only a small present,\" {he} said.", "\"This is for you,\" said {N}. \"I made it myself.\""],
        ["{F} looked at it and smiled. \"It is the best present of all,\" {fhe} said.", "\"It is beautiful!\" said {F}. \"Thank you!\"", "{F} was so happy that {fhe} hugged {N}."],
        ["\"Because you made it with love.\"", "{N} was very proud.", "Then they all ate cake and danced.", ""]],
    "mistake": [
        ["{when} {N} was playing with a ball in the house.", "{when} {N} ran through the kitchen.", "{when} {N} wanted to help and carried the plates."],
        ["Crash! The blue {jar} fell down and broke.", "There was a loud noise. The {jar} was on the floor, and it was broken.", "The {jar} fell from the table and broke into many pieces."],
        ["It was {F}'s favorite {jar}.", "The {jar} belonged to {F} the {fkind}.", "\"Oh no,\" said {N}. \"That was {F}'s {jar}!\""],
        ["{N} was afraid. {He} wanted to hide.", "At first, {N} hid the pieces {spot}.", "\"Nobody saw me,\" {he} thought."],
        ["But {he} did not feel good.", "But {his} heart was heavy, and {he} could not play.", "All day long, {he} thought about it."],
        ["In the evening, {he} went to {F}. \"I broke your {jar},\" {he} said. \"I am sorry.\"", "So {N} told {F} the truth. \"It was me,\" {he} said. \"I am very sorry.\""],
        ["{F} was quiet for a moment. Then {fhe} smiled.", "{F} was sad, but {fhe} was not angry.", "\"Thank you for telling me the truth,\" said {F}."],
        ["\"A {jar} can be mended,\" {fhe} said. \"Let us do it together.\"", "\"Come,\" said {F}, \"you can help me to make a new one.\"", "They took some glue and mended the {jar}."],
        ["{N} felt much better.", "{N} learned that it is always best to tell the truth.", "After that, {N} was always careful in the house."]],
    "learn": [
        ["{N} wanted to learn to {skill}.", "{when} {N} said, \"I want to {skill}.\"", "More than anything, {N} wished to {skill}."],
        ["{He} tried, but it did not work.", "The first time, it went very badly.", "\"It is too hard,\" said {N}."],
        ["Some of the others laughed.", "{N} was sad and sat down {spot}.", "\"I will never learn it,\" {he} said."],
        ["{F} the {fkind} saw {him}. \"I can teach you,\" {fhe} said.", "\"Do not give up,\" said {F} the {fkind}. \"I will show you how.\"", "Then an old {fkind} named {F} came to help."],
        ["Every day after breakfast, they practiced together.", "\"Again,\" said {F}, \"and slowly.\" {N} tried again.", "On Monday it was hard. On Tuesday it was a little better. On Wednesday it was almost good."],
        ["Day by day, {N} got better.", "{N} made many mistakes, but {he} learned from them.", "{N} worked hard and did not stop."],
        ["Then, one day, {he} could do it!", "And one morning, it worked!", "At last, {N} could {skill} all alone."],
        ["\"I can {skill}!\" {he} shouted.", "\"Look at me!\" said {N}.", "Everyone came to see, and everyone clapped."],
        ["\"I knew you could do it,\" said {F}.", "\"Thank you for helping me,\" said {N}.", "\"You did it because you did not give up,\" said {F}."]],
    "day": [
        ["{when} {N} woke up early. The sun was shining.", "{when} {N} got out of bed and looked out of the window.", "{when} {N} woke up and smelled fresh bread."],
        ["{He} washed {his} face and ate {food}.", "First, {he} had breakfast. {He} ate {food}.", "{He} put on {his} hat and went outside."],
        ["{He} went to see {F} the {fkind}. \"Good morning, {F}!\" {he} said.", "On the way, {he} met {F} the {fkind}.", "{F} the {fkind} was waiting at the gate."],
        ["\"Let us go to the {goal},\" said {F}. \"Yes, let us go!\" said {N}.", "\"What shall we do today?\" asked {F}. \"Let us go to the {goal},\" said {N}."],
        ["They walked slowly and sang a song.", "On the way, they saw birds, flowers and a little stream.", "The way was long, but they had a lot of fun."],
        ["At the {goal}, they played until noon.", "When they came to the {goal}, they sat down to rest.", "The {goal} was full of people."],
        ["Then they ate {food2} and looked at the clouds.", "They shared {food2}. It was very good.", "There they bought {food2} and ate it in the shade."],
        ["In the afternoon, they went home.", "When the sun went down, they walked back.", "Soon it was evening, and it was time to go home."],
        ["\"That was fun,\" said {N}. \"See you tomorrow!\" said {F}.", "\"Good night, {F},\" said {N}. \"Good night, {N},\" said {F}.", "{N} told {his} mother about the day."]],
}
FEAR = {"the dark": "went out at night", "the water": "went to swim", "high places": "climbed a tree", "loud noises": "played the drum", "the big hill": "went up the hill",
        "thunder": "played in the rain", "strangers": "went to the market"}
SKILLS = "swim|read|ride a bicycle|sing|fly a kite|bake bread|dance|climb trees|write|play the flute|paint|cook soup|skate on the ice|whistle".split("|")


def story(r):
    he = r.choice(["he", "she"])
    person = r.random() < 0.5
    kind = (CHILDREN[he] if r.random() < 0.6 else r.choice(GROWN[he])) if person else r.choice(CREATURES)
    fhe = r.choice(["he", "she"])
    names = {"he": BOYS, "she": GIRLS}
    N = r.choice(names[he])
    F = r.choice([n for n in names[fhe] if n != N])
    fkind = r.choice([c for c in CREATURES if c != kind]) if r.random() < 0.6 else r.choice([CHILDREN[fhe]] + GROWN[fhe])
    if fkind == kind:
        fkind = "turtle" if kind != "turtle" else "robin"
    his, him = {"he": ("his", "him"), "she": ("her", "her")}[he]
    fhis, fhim = {"he": ("his", "him"), "she": ("her", "her")}[fhe]
    home = r.choice(HOME["person" if person else "creature"])
    spots, foods, trait = r.sample(SPOT, 3), r.sample(FOOD, 2), r.choice(TRAIT)
    fear = r.choice(list(FEAR))
    words = dict(N=N, F=F, kind=kind, fkind=fkind, trait=trait, a_trait="a very " + r.choice(["kind", "brave", "curious", "clever", "happy", "shy", "careful"]), he=he, He=he.capitalize(),
                 his=his, His=his.capitalize(), him=him, fhe=fhe, fhis=fhis, fhim=fhim, home=home, home2=r.choice(["under a tree", "in the shade", "on a bench", "in the grass"]), thing=r.choice(THING),
                 spot=spots[0], spot2=spots[1], spot3=spots[2], food=foods[0], food2=foods[1], flower=r.choice(FLOWER), when=r.choice(WHEN), like=r.choice(LIKE),
                 p1=r.choice("baker|farmer|teacher|postman".split("|")), p1his=r.choice(["his", "her"]), fear=fear, went=FEAR[fear], toy=r.choice("boat|horse|bird|train|flute|box|cat".split("|")),
                 jar=r.choice("jar|cup|plate|lamp|vase|bowl|clock".split("|")), skill=r.choice(SKILLS), goal=r.choice("river|market|lake|hill|park|library|beach|forest|fair|old bridge".split("|")))
    # Friends met here for the first time are not introduced twice.
    likes = [l for l in r.sample(LIKES, r.choice([0, 1, 1, 2])) if l]
    if sum("{fkind}" in l for l in likes) > 1:
        likes = likes[:1]
    known = any("{fkind}" in l for l in likes)
    parts = [r.choice(OPEN)] + likes + [r.choice(step) for step in PLOTS[r.choice(list(PLOTS))]] + [r.choice(END)]
    if known:
        swap = [("A {fkind} named {F} heard {him}.", "{F} heard {him}."), ("Then {he} met a {fkind} named {F}.", "Then {he} met {F}."), (" a {fkind} named {F} sat", " {F} sat"),
                ("A {fkind} named {F} sat", "{F} sat"), ("Outside stood a {fkind} named {F}.", "Outside stood {F}."), ("an old {fkind} named {F} came", "{F} came"),
                ("A {fkind} came out of the trees. \"My name is {F},\" {fhe} said. \"Are you lost?\"", "{F} came out of the trees. \"Are you lost?\" {fhe} asked."), ("{F} the {fkind}", "{F}")]
        for i in range(1 + len(likes), len(parts)):
            for a, b in swap:
                parts[i] = parts[i].replace(a, b)
    text = " ".join(p.format(**words) for p in parts if p)
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}").replace(f"A {vowel}", f"An {vowel}").replace(f"\"a {vowel}", f"\"an {vowel}")
    return text


def stories(seed):
    r = random.Random(seed)
    while True:
        yield story(r)
